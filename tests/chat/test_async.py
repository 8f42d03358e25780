"""Sessions and engines for `async` callers: turns, cancellation, and no leftover threads."""

import asyncio
import threading
from collections.abc import Generator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from offspec.core.errors import RequestError, StreamError
from offspec.core.events import Event, Finished, Notice, Prefill, TreeSeen
from offspec.core.threads import ExclusiveUse, stream_in_thread
from tests.chat.talks import LONG, said
from tests.support.fake_engine import PassGate, Script, ScriptedEngine
from tests.support.waiting import PATIENCE


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Check that none of our threads is left soon after the end."""
    before = set(threading.enumerate())
    yield
    ours = [t for t in threading.enumerate() if t.name.startswith("offspec") and t not in before]
    for thread in ours:  # generators that are not awaited are collected with the loop
        thread.join(PATIENCE)
    assert [thread.name for thread in ours if thread.is_alive()] == []


async def until(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, PATIENCE)


async def drain(events: Any) -> None:
    async for _ in events:
        pass


async def test_tasks_take_turns() -> None:
    session = ScriptedEngine([LONG]).chat()
    await asyncio.gather(*(drain(session.asend(f"Question {n}.")) for n in range(4)))
    assert session.conversation.turns == 4 and said(session)[1::2] == [LONG] * 4
    events = [event async for event in session.aretry(trees=True)]
    assert isinstance(events[0], Prefill) and isinstance(events[-1], Finished)
    assert any(isinstance(event, TreeSeen) for event in events) and len(session.branches) == 1


async def test_cancel_in_the_middle_of_a_pass() -> None:
    engine = ScriptedEngine([LONG, "Yes."])
    session = engine.chat()
    engine.gate = PassGate(1)
    task = asyncio.create_task(drain(session.asend("Count.")))
    await until(engine.at_gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not session.busy
    assert said(session)[-1] == "one two three four" and session.messages[-1].finish == "halted"
    engine.gate.set()
    assert [e async for e in session.asend("Go on.")]


async def test_cancel_while_waiting_for_a_turn() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    engine.gate.clear()
    first = asyncio.create_task(drain(session.asend("One.")))
    await until(engine.at_gate)
    second = asyncio.create_task(drain(session.asend("Two.")))
    await asyncio.sleep(0.1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert not first.done()
    engine.gate.set()
    await first
    assert session.conversation.turns == 1 and session.messages[-1].finish == "eos"


async def test_early_close() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    engine.gate.clear()
    async with aclosing(session.asend("Count.")) as events:
        async for _ in events:
            break
    assert session.messages[-1].finish == "halted"
    async for _ in session.asend("Never begun."):
        break  # closed by the loop when collected, or at the end
    session = ScriptedEngine([LONG]).chat()
    await session.asend("Count.").aclose()
    assert session.messages == ()


async def test_errors_reach_the_caller() -> None:
    session = ScriptedEngine([Script(LONG, fail_after=1)]).chat()
    with pytest.raises(RequestError, match="empty"):
        await drain(session.asend(" "))
    with pytest.raises(StreamError):
        await drain(session.asend("Count."))
    assert session.messages[-1].finish == "failed"


def test_closed_loop_does_not_keep_the_thread() -> None:
    go = threading.Event()

    def events() -> Generator[Event, None, None]:
        yield Notice("one")
        go.wait(PATIENCE)
        yield Notice("two")

    loop = asyncio.new_event_loop()
    stream = stream_in_thread(events, lambda: None)
    assert loop.run_until_complete(anext(stream)) == Notice("one")
    loop.close()
    go.set()
    for thread in threading.enumerate():
        if thread.name == "offspec async":
            thread.join(PATIENCE)
            assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        asyncio.run(stream.aclose())


async def test_non_blocking_request_does_not_wait() -> None:
    turns = ExclusiveUse("busy")

    def take() -> None:
        with turns.take(wait=False):
            pass

    with turns.take():
        assert turns.locked
        with pytest.raises(RequestError, match="busy"):
            await asyncio.to_thread(take)
    assert not turns.locked
    take()


@pytest.mark.exhaustive
async def test_async_engine(tmp_path: Path) -> None:
    from offspec.core.config import SamplingParams
    from tests.support.tiny_models import tiny_engine, write_model

    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with tiny_engine(write_model(tmp_path / "model")) as engine:
        wanted = engine.generate([5, 9, 17], params)
        result, other = await asyncio.gather(
            engine.agenerate([5, 9, 17], params), engine.agenerate([5, 9], params)
        )
        assert result.token_ids == wanted.token_ids and other.tokens == 30
        events = [event async for event in engine.astream([5, 9, 17], params, trees=True)]
        assert isinstance(events[0], Prefill) and any(isinstance(event, TreeSeen) for event in events)
        async with aclosing(engine.astream([5, 9, 17], params)) as stream:
            await anext(stream)
        held = engine.stream([5, 9, 17], params)
        next(held)
        waiting = asyncio.create_task(engine.agenerate([5], params))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert list(held)  # the holder of the turn continues

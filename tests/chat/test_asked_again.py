"""Questions asked differently, answers tried again, and answers that were broken off."""

import asyncio
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from offspec.chat.session import Session
from offspec.core.config import SamplingParams
from offspec.core.errors import ClosedError, RequestError, StreamError
from offspec.core.events import Event, Finished, Piece, TextDelta
from tests.support.fake_engine import Script, ScriptedEngine

LONG = "one two three four five six seven eight nine ten eleven twelve"


def said(session: Session) -> list[str]:
    return [message.content for message in session.messages]


def test_asked_differently() -> None:
    engine = ScriptedEngine(["a", "b", "c", "d"])
    session = engine.chat()
    with pytest.raises(RequestError, match="no question"):
        list(session.edit("Else?"))
    list(session.send("One?"))
    list(session.send("Two?"))
    done = list(session.edit("Three?"))[-1]
    assert said(session) == ["One?", "a", "Three?", "c"]
    assert isinstance(done, Finished) and done.result.reused_tokens >= len(engine.asked[0][0]) + 1

    async def work() -> None:
        assert [event async for event in session.aedit("Four?", trees=True)]

    asyncio.run(work())
    assert said(session) == ["One?", "a", "Four?", "d"]


def test_a_refused_edit_leaves_what_was_there() -> None:
    engine = ScriptedEngine(["a", "b"], context=40)
    session = engine.chat()
    list(session.send("One?"))
    list(session.send("Two?"))
    before, used = session.messages, session.used
    for text, complaint in (("", "empty"), ("word " * 50, "room for 40"), ("\ud800", "Unicode")):
        with pytest.raises(RequestError, match=complaint):
            list(session.edit(text))
    engine.closed = True
    with pytest.raises(ClosedError):
        list(session.edit("Three?"))
    assert session.messages == before and session.used == used


def test_a_question_without_an_answer_is_asked_differently() -> None:
    session = ScriptedEngine([Script("x", fail_after=0), "b"]).chat()
    with pytest.raises(StreamError):
        list(session.send("One?"))
    session.conversation.change(session.messages[:1])  # as after a kill
    list(session.edit("Two?"))
    assert said(session) == ["Two?", "b"]


def seeded(session: Session, seed: int | None) -> None:
    session.params = replace(session.params, seed=seed)


def test_a_seed_that_is_set_is_the_next_one_tried() -> None:
    engine = ScriptedEngine(["x"])
    session = engine.chat(params=SamplingParams(temperature=1.0))
    list(session.send("One?"))  # with a seed of its own
    seeded(session, 100)
    for _ in range(3):
        list(session.retry())
    seeded(session, 5)
    list(session.retry())
    list(session.retry())
    assert [asked.params.seed for asked in engine.asked] == [None, 100, 101, 102, 5, 6]


def test_a_seed_set_anew_where_the_last_answer_had_one_near_it() -> None:
    engine = ScriptedEngine(["x"])
    session = engine.chat(params=SamplingParams(temperature=1.0, seed=3))
    list(session.send("One?"))
    seeded(session, 2)
    list(session.send("Two?"))
    list(session.retry())  # 3
    session.rewind()  # back to an answer with that seed, which was not come to by retries
    list(session.send("Two?"))
    session.rewind()
    list(session.retry())
    assert [asked.params.seed for asked in engine.asked] == [3, 2, 3, 2, 2]


def test_a_refused_retry_does_not_move_the_seed_on() -> None:
    engine = ScriptedEngine(["x"])
    session = engine.chat(params=SamplingParams(temperature=1.0, seed=3))
    list(session.send("One?"))
    list(session.retry())
    engine.closed = True
    with pytest.raises(ClosedError):
        list(session.retry())
    with pytest.raises(ClosedError):
        list(session.send("Two?"))
    engine.closed = False
    list(session.retry())
    assert [asked.params.seed for asked in engine.asked] == [3, 4, 5]


class Holding(ScriptedEngine):
    """Holds the end of what was said back, as what could begin a stop string, until the answer is over."""

    def stream(self, *args: Any, **more: Any) -> Generator[Event, None, None]:
        try:
            for event in super().stream(*args, **more):
                if isinstance(event, Finished):
                    yield TextDelta(" held", (), (Piece(" held", "bonus"),))
                yield event
        except StreamError:
            yield TextDelta(" held", (), (Piece(" held", "bonus"),))
            raise


def test_what_was_held_back_at_a_fault_is_kept() -> None:
    session = Holding([Script(LONG, fail_after=1)]).chat()
    with pytest.raises(StreamError):
        list(session.send("Count."))
    assert session.messages[1].content == "one two three four held" and session.messages[1].finish == "failed"


def test_what_was_held_back_is_kept_when_nobody_reads_on() -> None:
    session = Holding([LONG]).chat()
    events = session.send("Count.")
    next(event for event in events if isinstance(event, TextDelta))
    events.close()
    answer = session.messages[1]
    assert answer.content == "one two three four held" and answer.finish == "halted"
    assert answer.figures is not None and answer.figures.seed == 7  # as the engine says it at the end
    assert not session.busy and list(session.send("More."))


def test_a_fault_while_an_answer_is_given_up_is_nobody_s() -> None:
    class Failing(ScriptedEngine):
        def stream(self, *args: Any, **more: Any) -> Generator[Event, None, None]:
            for event in super().stream(*args, **more):
                yield event
                if isinstance(event, TextDelta):
                    raise StreamError("read failed", file="x", offset=0)

    session = Failing([LONG]).chat()
    events = session.send("Count.")
    next(event for event in events if isinstance(event, TextDelta))
    events.close()
    assert session.messages[1].finish == "halted" and not session.busy


def test_a_stop_before_its_turn_leaves_nothing() -> None:
    session = ScriptedEngine(["a"]).chat()
    waiting = [session.send("One?"), session.retry(), session.edit("Two?")]
    session.stop()
    for events in waiting:
        with pytest.raises(RequestError, match="before its turn"):
            list(events)
    assert session.messages == () and not session.busy

"""Several choices of one request on an engine of several sequences: they share passes, and their end."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.errors import StreamError
from offspec.core.events import Event, Result
from offspec.engine.engine import Engine
from offspec.engine.forest import PassResult
from offspec.engine.passes import Passes
from offspec.engine.request import PassSpent, RunningRequest
from offspec.server.metrics import Metrics
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine
from tests.support.waiting import until

MESSAGES: list[Any] = [{"role": "user", "content": "w12 w13 w14 w12 w13"}]
ASKED: Any = {"model": NAME, "messages": MESSAGES, "temperature": 1, "seed": 11, "max_tokens": 8}
ASKED["extra_body"] = {"ignore_eos": True}


@pytest.fixture(scope="module")
def wide(tiny_folder: Path) -> Iterator[LiveServer]:
    """Answers four requests, or choices, at a time."""
    with LiveServer(tiny_engine(tiny_folder, "none", budget=1, sequences=4)) as server:
        yield server


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No pass runs before it is set, but for those of requests that are all halted."""
    gate, step = threading.Event(), Passes.step

    def held(own: Passes, requests: list[RunningRequest]) -> list[list[Event]]:
        until(lambda: gate.is_set() or all(request.halted for request in requests))
        return step(own, requests)

    monkeypatch.setattr(Passes, "step", held)
    return gate


def _begun(count: int, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once so many choices are with the engine."""
    there, submit, asked = threading.Event(), Engine.submit, list[None]()

    def counted(*given: Any, **options: Any) -> Any:
        answer = submit(*given, **options)
        asked.append(None)
        if len(asked) == count:
            there.set()
        return answer

    monkeypatch.setattr(Engine, "submit", counted)
    return there


@pytest.mark.parametrize("stream", [False, True])
def test_they_share_passes(
    wide: LiveServer, alone: Engine, stream: bool, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, sizes, step = _begun(4, monkeypatch), list[int](), Passes.step

    def counted(own: Passes, requests: list[RunningRequest]) -> list[list[Event]]:
        sizes.append(len(requests))
        return step(own, requests)

    monkeypatch.setattr(Passes, "step", counted)
    each = [SamplingParams(temperature=1.0, seed=11 + at, max_tokens=8, ignore_eos=True) for at in range(6)]
    gate.set()
    expected = [alone.generate(MESSAGES, params, speculate=False).text for params in each]
    gate.clear()
    sizes.clear()
    with wide.client() as client, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.chat.completions.create, **ASKED, n=6, stream=stream)
        assert there.wait(60)
        gate.set()
        answer: Any = asking.result()
        said, ends, order = [""] * 6, list[int](), list[int]()
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                said[choice.index] += (choice.delta if stream else choice.message).content or ""
                order.append(choice.index)
                ends += [choice.index] if choice.finish_reason == "length" else []
    assert said == expected and sorted(ends) == [*range(6)]
    assert max(sizes) == 4 and sum(sizes) == 6 * 8 and len(sizes) < 6 * 4
    if stream:  # in between, not one after the other
        assert order[6:] != sorted(order[6:])


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_share_passes(
    wide: LiveServer, alone: Engine, stream: bool, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, asked = [f"w{at} w12 w13" for at in range(20, 26)], dict(ASKED)
    del asked["messages"]
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8, ignore_eos=True)
    gate.set()
    expected = [alone.generate(prompt, params, raw=True, speculate=False).text for prompt in prompts]
    gate.clear()
    there = _begun(4, monkeypatch)
    with wide.client() as client, ThreadPoolExecutor(1) as pool:
        asking = pool.submit(client.completions.create, **asked, prompt=prompts, stream=stream)
        assert there.wait(60), "four begin before any has ended"
        until(lambda: wide.service.queue_length == 1)
        gate.set()
        answer: Any = asking.result()
        said, ends = [""] * 6, list[int]()
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                said[choice.index] += choice.text
                ends += [choice.index] if choice.finish_reason == "length" else []
        if not stream:
            assert answer.usage.completion_tokens == 6 * 8
    assert said == expected and sorted(ends) == [*range(6)]


def test_a_client_that_leaves_ends_all_prompts(
    wide: LiveServer, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**ASKED, "prompt": ["w12", "w13", "w14", "w15", "w16", "w17"]}
    del asked["messages"]
    there = _begun(4, monkeypatch)
    with wide.client() as client:
        chunks = client.completions.create(**asked, stream=True)
        assert there.wait(60)
        chunks.close()
        wide.wait_until_idle()
        gate.set()
        assert len(client.completions.create(**asked).choices) == 6


def test_a_client_that_leaves_ends_all(
    wide: LiveServer, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = _begun(4, monkeypatch)
    with wide.client() as client:
        chunks = client.chat.completions.create(**ASKED, n=9, stream=True)
        assert there.wait(60)
        chunks.close()
        wide.wait_until_idle()
        gate.set()
        assert client.chat.completions.create(**ASKED, n=2).choices[1].finish_reason == "length"


@pytest.mark.parametrize("failing", [0, 2])
def test_one_that_fails_ends_all(wide: LiveServer, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Engine._begin_answer

    def broken(own: Engine, answer: Any, state: Any) -> RunningRequest:
        if answer.request.params.seed == 11 + failing:
            raise StreamError("broken", file="weights", offset=0)
        return begin(own, answer, state)

    told = list[str]()
    with wide.client() as client:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Metrics, "failed", lambda own, kind: told.append(kind))
            engine: Any = wide.service.engine
            meanwhile.setattr(engine._scheduler, "_begin", partial(broken, engine))
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**ASKED, n=5)
            wide.wait_until_idle()
        assert told == ["StreamError"]
        assert len(client.chat.completions.create(**ASKED, n=5).choices) == 5


def test_an_error_of_a_pass_is_told_once(wide: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it ends all choices that share the pass."""
    told = list[str]()

    def broken(own: RunningRequest, done: PassResult, spent: PassSpent) -> list[Event]:
        raise StreamError("broken", file="weights", offset=0)

    with wide.client() as client:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(RunningRequest, "take", broken)
            meanwhile.setattr(Metrics, "failed", lambda own, kind: told.append(kind))
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**ASKED, n=4)
            wide.wait_until_idle()
        assert told == ["StreamError"]
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"


def test_many_hold_nobody_up(
    wide: LiveServer, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that comes while they are given is answered before most of them."""
    there, ended, answered = _begun(4, monkeypatch), list[int](), Metrics.answered

    def noted(own: Metrics, result: Result) -> None:
        ended.append(result.tokens)
        answered(own, result)

    monkeypatch.setattr(Metrics, "answered", noted)
    with wide.client() as client, ThreadPoolExecutor(2) as pool:
        many = pool.submit(client.chat.completions.create, **ASKED, n=40)
        assert there.wait(60)
        one = pool.submit(client.chat.completions.create, **{**ASKED, "max_tokens": 7})
        until(lambda: wide.service.queue_length == 1)
        gate.set()
        assert len(one.result().choices) == 1 and len(many.result().choices) == 40
    assert ended.index(7) < 16

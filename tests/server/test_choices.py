"""Several choices of one request on an engine with several sequences: they share passes, and end together."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.errors import StreamError
from offspec.core.events import Event, Result
from offspec.engine.engine import Engine
from offspec.engine.pass_runner import PassRunner
from offspec.engine.sequence import PassUsage, RunningSequence
from offspec.engine.sequence_pass import PassResult
from offspec.server.metrics import Metrics
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine
from tests.support.waiting import PATIENCE, wait_until

MESSAGES: list[Any] = [{"role": "user", "content": "w12 w13 w14 w12 w13"}]
PROMPTS = [f"w{at} w12 w13" for at in range(20, 26)]
SAMPLED: Any = {"model": NAME, "temperature": 1, "seed": 11, "max_tokens": 8}
SAMPLED["extra_body"] = {"ignore_eos": True}
ASKED: Any = {**SAMPLED, "messages": MESSAGES}


@pytest.fixture(scope="module")
def wide(tiny_folder: Path) -> Iterator[LiveServer]:
    """A server that runs four requests, or choices, at a time."""
    with LiveServer(tiny_engine(tiny_folder, "none", budget=1, sequences=4)) as server:
        yield server


class Gate(threading.Event):
    """Blocks passes until it is set, except passes whose requests are all halted.

    four_submitted: set once four choices are submitted. sizes: requests of each pass. submitted: choices so
        far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.four_submitted, self.sizes, self.submitted = threading.Event(), list[int](), 0
        self._step, self._submit = PassRunner.step, Engine.submit

    def step(self, own: PassRunner, requests: list[RunningSequence]) -> list[list[Event]]:
        wait_until(lambda: self.is_set() or all(request.halted for request in requests))
        self.sizes.append(len(requests))
        return self._step(own, requests)

    def submit(self, *given: Any, **options: Any) -> Any:
        answer = self._submit(*given, **options)
        self.submitted += 1
        if self.submitted == 4:
            self.four_submitted.set()
        return answer


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr(PassRunner, "step", lambda own, requests: gate.step(own, requests))
    monkeypatch.setattr(Engine, "submit", lambda *given, **options: gate.submit(*given, **options))
    return gate


@pytest.mark.parametrize("prompts", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_choices_share_passes(
    wide: LiveServer, alone: Engine, stream: bool, prompts: bool, gate: Gate
) -> None:
    """Several choices of a chat, or several prompts."""
    gate.set()
    params = [SamplingParams(temperature=1.0, seed=11 + at, max_tokens=8, ignore_eos=True) for at in range(6)]
    if prompts:
        answers = [alone.generate(prompt, params[0], raw=True, speculate=False) for prompt in PROMPTS]
    else:
        answers = [alone.generate(MESSAGES, each, speculate=False) for each in params]
    gate.clear()
    gate.sizes.clear()
    with wide.client() as client, ThreadPoolExecutor(1) as pool:
        ask: Callable[..., Any] = client.completions.create if prompts else client.chat.completions.create
        given = {**SAMPLED, "prompt": PROMPTS} if prompts else {**ASKED, "n": 6}
        asking = pool.submit(ask, **given, stream=stream)
        assert gate.four_submitted.wait(PATIENCE), "four start before any has ended"
        wait_until(lambda: not prompts or wide.service.queue_length == 1)
        gate.set()
        answer = asking.result()
        said, ends, order = [""] * 6, list[int](), list[int]()
        for chunk in answer if stream else [answer]:
            for choice in chunk.choices:
                part = choice if prompts else choice.delta if stream else choice.message
                said[choice.index] += (part.text if prompts else part.content) or ""
                order.append(choice.index)
                ends += [choice.index] if choice.finish_reason == "length" else []
    assert said == [each.text for each in answers] and sorted(ends) == [*range(6)]
    assert stream or answer.usage.completion_tokens == 6 * 8
    assert max(gate.sizes) == 4 and sum(gate.sizes) == 6 * 8 and len(gate.sizes) < 6 * 4
    if stream:  # interleaved, not one after the other
        assert order[6:] != sorted(order[6:])


@pytest.mark.parametrize("prompts", [False, True])
def test_disconnect_ends_all_choices(wide: LiveServer, prompts: bool, gate: Gate) -> None:
    with wide.client() as client:
        ask: Callable[..., Any] = client.completions.create if prompts else client.chat.completions.create
        given = {**SAMPLED, "prompt": PROMPTS} if prompts else {**ASKED, "n": 9}
        chunks = ask(**given, stream=True)
        assert gate.four_submitted.wait(PATIENCE)
        chunks.close()
        wait_until(lambda: not wide.server.server_state.tasks)
        gate.set()
        wide.wait_until_idle()
        assert gate.submitted == 4, "none has started since"
        assert all(choice.finish_reason == "length" for choice in ask(**given).choices)


def test_prompt_is_scanned_for_marks_once(wide: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, prompts_scanned = Engine.parts, list[Any]()

    def noted(own: Engine, *given: Any) -> Any:
        prompts_scanned.append(given)
        return parts(own, *given)

    monkeypatch.setattr(Engine, "parts", noted)
    with wide.client() as client:
        assert len(client.chat.completions.create(**ASKED, n=3).choices) == 3
    assert len(prompts_scanned) == 1


@pytest.mark.parametrize("failing", [0, 2])
def test_failing_choice_ends_all(wide: LiveServer, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, recorded = Engine.submit, list[str]()

    def broken(own: Engine, ids: Any, params: SamplingParams, **options: Any) -> Any:
        if params.seed == 11 + failing:
            raise StreamError("broken", file="weights", offset=0)
        return submit(own, ids, params, **options)

    with wide.client() as client:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(Metrics, "record_error", lambda own, kind: recorded.append(kind))
            meanwhile.setattr(Engine, "submit", broken)
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**ASKED, n=5)
            wide.wait_until_idle()
        assert recorded == ["StreamError"]
        assert len(client.chat.completions.create(**ASKED, n=5).choices) == 5


def test_pass_error_is_recorded_once(wide: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once, though it ends all choices that share the pass."""
    recorded = list[str]()

    def broken(own: RunningSequence, done: PassResult, spent: PassUsage) -> list[Event]:
        raise StreamError("broken", file="weights", offset=0)

    with wide.client() as client:
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(RunningSequence, "process_pass", broken)
            meanwhile.setattr(Metrics, "record_error", lambda own, kind: recorded.append(kind))
            with pytest.raises(openai.InternalServerError):
                client.chat.completions.create(**ASKED, n=4)
            wide.wait_until_idle()
        assert recorded == ["StreamError"]
        assert client.chat.completions.create(**ASKED).choices[0].finish_reason == "length"


def test_many_choices_do_not_delay_other_requests(
    wide: LiveServer, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that arrives meanwhile is answered before most of the choices."""
    ended, answered = list[int](), Metrics.record_answer

    def noted(own: Metrics, result: Result) -> None:
        ended.append(result.tokens)
        answered(own, result)

    monkeypatch.setattr(Metrics, "record_answer", noted)
    with wide.client() as client, ThreadPoolExecutor(2) as pool:
        many = pool.submit(client.chat.completions.create, **ASKED, n=40)
        assert gate.four_submitted.wait(PATIENCE)
        one = pool.submit(client.chat.completions.create, **{**ASKED, "max_tokens": 7})
        wait_until(lambda: wide.service.queue_length == 1)
        gate.set()
        assert len(one.result().choices) == 1 and len(many.result().choices) == 40
    assert ended.index(7) < 16

"""Answers that share passes equal separate answers, even if others join, leave or fail."""

import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import offspec
from offspec import ClosedError, RequestError, SamplingParams, StreamError
from offspec.core.events import Event, Finished, PassProgress, PassStats, Result, TextDelta
from offspec.core.memory import resident_bytes
from offspec.engine.answer import Answer
from offspec.engine.engine import Engine
from offspec.engine.pass_runner import PassRunner
from offspec.engine.sequence import RunningSequence
from offspec.engine.sequence_pass import SequencePass
from offspec.model import runner
from offspec.model.cache import TreeCache
from offspec_planners.placement import Placement
from tests.support.answers import sampling
from tests.support.exhaustive import sampled_params
from tests.support.expert_models import on_demand_placement, write_experts
from tests.support.tiny_models import tiny_engine, write_hybrid, write_model
from tests.support.waiting import wait_until

Hold = Callable[[int], threading.Event]
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(41)]
PARAMS = sampling(0.9)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def write(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name) / "model"
        if name == "hybrid":
            return write_hybrid(folder, "qwen3_5_text")
        if name == "experts":
            return write_experts(folder, "mixtral")
        return write_model(folder, seed=99 if name == "hostile" else 0)

    return write


@pytest.fixture
def model(written: Callable[[str], Path]) -> Path:
    return written("dense")


def _together(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> list[Answer]:
    """Submit requests that all begin with the same pass."""
    with engine._scheduler.paused(), ThreadPoolExecutor(1) as pool:
        return [*pool.map(partial(engine.submit, params=params), prompts)]


def _anew(engine: Engine, prompt: Sequence[int], params: SamplingParams = PARAMS) -> Result:
    """Return the separate answer to an uncached prompt, without speculation."""
    engine._states.first.forget()
    return engine.generate(prompt, params, speculate=False)


def _begun(answer: Answer) -> Event:
    return next(event for event in answer if isinstance(event, TextDelta))


@pytest.mark.parametrize(
    ("owner", "step"),
    sampled_params(
        [(SequencePass, "begin_tree"), (SequencePass, "commit"), (RunningSequence, "process_pass")],
        (SequencePass, "commit"),
    ),
)
def test_a_failure_of_one_sequence_affects_no_other(
    owner: type[Any], step: str, model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [PROMPT[:10], [5, *PROMPT[:12]], PROMPT[20:]]
    whole = getattr(owner, step)

    def broken(own: Any, *args: Any, **options: Any) -> Any:
        if own.state.ids[0] == 5:
            raise ZeroDivisionError(step)
        return whole(own, *args, **options)

    with tiny_engine(model, "self", budget=8, sequences=3) as engine:
        expected = [engine.generate(prompt, PARAMS).token_ids for prompt in prompts]
        gate = hold_passes(4)
        answers = _together(engine, prompts, PARAMS)
        _begun(answers[1])
        monkeypatch.setattr(owner, step, broken)
        gate.set()
        for answer, tokens in zip(answers[::2], expected[::2], strict=True):
            assert answer.result(timeout=60).token_ids == tokens
        with pytest.raises(ZeroDivisionError, match=step):
            answers[1].result(timeout=60)
        monkeypatch.setattr(owner, step, whole)
        assert engine.submit(prompts[1], PARAMS).result(timeout=60).token_ids == expected[1]


def test_a_request_waits_for_memory_that_others_have(
    model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(own: TreeCache) -> TreeCache:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with tiny_engine(model, "none", budget=1, sequences=3) as engine:
        monkeypatch.setattr(TreeCache, "empty_copy", refused)
        expected = [engine.generate(prompt, PARAMS).token_ids for prompt in (PROMPT, PROMPT[::-1])]
        gate = hold_passes(3)
        first = engine.submit(PROMPT, PARAMS)
        second = engine.submit(PROMPT[::-1], PARAMS)
        _begun(first)
        assert not second.done()
        gate.set()
        assert [answer.result(timeout=60).token_ids for answer in (first, second)] == expected


def _requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    dice = random.Random(5)

    def prompt() -> list[int]:
        own = [dice.randrange(3, 93) for _ in range(dice.choice((1, 4, 12, 40)))]
        return [*PROMPT[: dice.choice((0, 0, 5, 30))], *own]

    return [
        (
            prompt(),
            SamplingParams(
                temperature=dice.choice((0.0, 1.0)),
                seed=index,
                max_tokens=dice.choice((1, 4, 10)),
                ignore_eos=dice.random() < 0.7,
                stop=("w7",) if dice.random() < 0.2 else (),
                repetition_penalty=dice.choice((1.0, 1.1)),
            ),
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("kind", "draft"), [("dense", "hostile"), ("hybrid", "itself"), ("experts", "none")])
def test_requests_come_and_go(kind: str, draft: str, written: Callable[[str], Path]) -> None:
    """More requests than can share a pass; some are cancelled while running."""
    source = {"none": "suffix", "itself": "self,suffix", "hostile": str(written("hostile"))}[draft]
    placement: Placement | None = on_demand_placement(3, 6) if kind == "experts" else None
    requests = _requests(16)
    with tiny_engine(written(kind), source, budget=24, placement=placement, sequences=5) as engine:
        with engine._scheduler.paused(), ThreadPoolExecutor(1) as pool:
            drafts = [None, None, None, "none"] * 4
            answers = [*pool.map(lambda one, draft: engine.submit(*one, draft=draft), requests, drafts)]
        for answer in answers[::7]:
            _begun(answer)
            answer.cancel()
        results = [answer.result(timeout=60) for answer in answers]
        shared = [event.sequences for each in answers for event in each if isinstance(event, PassStats)]
        assert max(shared) == 5 and sum(shared) > 2 * len(shared)
        for (prompt, params), answer, result in zip(requests, answers, results, strict=True):
            alone = _anew(engine, prompt, params)
            if result.finish_reason == "halted":
                assert answer.cancelled() and alone.token_ids[: result.tokens] == result.token_ids
            else:
                assert (result.token_ids, result.text) == (alone.token_ids, alone.text)
                assert result.finish_reason == alone.finish_reason


@pytest.fixture
def first_words(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[list[int], list[int]]]:
    """Return a function that records requests per pass, and the first pass with text of the last one."""

    def count(requests: int) -> tuple[list[int], list[int]]:
        passes, spoken, step = list[int](), list[int](), PassRunner.step

        def counted(own: PassRunner, running: list[RunningSequence]) -> list[list[Event]]:
            passes.append(len(running))
            found = step(own, running)
            speaks = len(found) == requests and any(isinstance(event, TextDelta) for event in found[-1])
            if speaks and not spoken:
                spoken.append(len(passes))
            return found

        monkeypatch.setattr(PassRunner, "step", counted)
        return passes, spoken

    return count


def test_a_new_request_has_text_within_two_passes(
    model: Path, hold_passes: Hold, first_words: Callable[[int], tuple[list[int], list[int]]]
) -> None:
    """Seven other requests are running; the rest of the new prompt shares their passes."""
    with tiny_engine(model, "none", budget=1, sequences=8) as engine:
        gate, prompts = hold_passes(3), [[3 + i, 4, 5] for i in range(7)]
        for other in _together(engine, prompts, replace(PARAMS, max_tokens=120)):
            _begun(other)
        passes, spoken = first_words(8)
        newcomer = engine.submit(PROMPT, PARAMS)
        gate.set()
        assert newcomer.result().tokens == PARAMS.max_tokens and max(passes) == 8
        assert spoken[0] <= 2, "beside one that was under way"


@pytest.mark.parametrize("kind", sampled_params(["dense", "hybrid"], "dense"))
def test_a_long_prompt_is_read_between_trees(
    kind: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHARED_PROMPT_ROWS", 16)
    with tiny_engine(written(kind), "suffix", budget=8, sequences=3) as engine:
        first = engine.submit([5, 6, 7], replace(PARAMS, max_tokens=40))
        prompts = [PROMPT * 2, [*PROMPT, 9, 9]]
        results = engine.generate_many(prompts, PARAMS)
        assert first.result().tokens == 40
        assert len([event for event in first if isinstance(event, PassStats)]) > 5
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == _anew(engine, prompt).token_ids


@pytest.mark.parametrize(
    ("kind", "int8"), sampled_params([("dense", True), ("hybrid", False)], ("dense", True))
)
def test_a_shared_prompt_is_computed_once(kind: str, int8: bool, written: Callable[[str], Path]) -> None:
    with tiny_engine(written(kind), "suffix", budget=8, sequences=4, int8_cache=int8) as engine:
        first = engine.generate(PROMPT, PARAMS)
        asked = [replace(PARAMS, seed=seed) for seed in range(7, 11)]
        results = engine.generate_many([PROMPT] * 4, asked)
        assert [result.reused_tokens for result in results] == [len(PROMPT) - 1] * 4
        assert results[0].token_ids == first.token_ids
        assert len({result.token_ids for result in results}) == 4
        longer = [*PROMPT, *results[3].token_ids[:5], 8]
        again = engine.submit(longer, PARAMS).result()
        assert again.reused_tokens >= len(PROMPT) - 1
        assert again.token_ids == _anew(engine, longer).token_ids


def test_a_cache_replaced_by_a_copy_is_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_CACHE", str(tmp_path))
    params = replace(PARAMS, max_tokens=2)
    first, second = ([3 + (7 * i * i + start * i) % 90 for i in range(300)] for start in (1, 2))
    with tiny_engine(model, "none", budget=1, context=400, sequences=2, cache_size=1 << 30) as engine:
        for prompt in (first, second):
            engine.submit(prompt, params).result()
        copied = engine.submit([*second[:60], 5], params).result()
        assert copied.reused_tokens == 60
        again = engine.submit(first, params).result()
        assert again.reused_tokens >= 256, "from its file"
        assert again.token_ids == _anew(engine, first, params).token_ids


def test_an_error_reaches_all_and_the_engine_goes_on(
    model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object) -> None:
        raise StreamError("broken", file="weights", offset=0)

    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        gate = hold_passes(3)
        answers = _together(engine, [PROMPT[:10], PROMPT[10:20]], replace(PARAMS, max_tokens=100))
        _begun(answers[1])
        with monkeypatch.context() as meanwhile:
            meanwhile.setattr(PassRunner, "_run", broken)
            gate.set()
            for answer in answers:
                with pytest.raises(StreamError):
                    answer.result(timeout=60)
        for answer in answers:
            with pytest.raises(StreamError):
                assert all(not isinstance(event, Finished) for event in answer)
        assert engine.submit(PROMPT, PARAMS).result().token_ids == engine.generate(PROMPT, PARAMS).token_ids
        with pytest.raises(RequestError):
            engine.submit([10**6], PARAMS)
        with pytest.raises(RequestError, match="one for each"):
            engine.generate_many([PROMPT], [PARAMS, PARAMS])


def test_streams_and_answers_wait_for_a_sequence(model: Path) -> None:
    with tiny_engine(model, "none", budget=1, sequences=1) as engine:
        expected = engine.generate(PROMPT, PARAMS).token_ids
        events = engine.stream(PROMPT, PARAMS)
        next(events)
        with pytest.raises(RequestError, match="another answer"):
            engine.submit(PROMPT, PARAMS)
        (submitted,) = ThreadPoolExecutor(1).map(engine.submit, [PROMPT], [PARAMS])
        with pytest.raises(TimeoutError):
            submitted.result(timeout=0.02)
        assert isinstance([*events][-1], Finished)
        assert submitted.result(timeout=60).token_ids == expected


def test_streams_share_passes_with_answers(model: Path, hold_passes: Hold) -> None:
    """A stalled reader blocks only its own stream, after two passes."""
    params = replace(PARAMS, max_tokens=30)
    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        expected = engine.generate(PROMPT, params)
        gate = hold_passes(2)
        events = engine.stream(PROMPT, params)
        shown = [next(events), next(events)]
        (submitted,) = ThreadPoolExecutor(1).map(engine.submit, [PROMPT[::-1]], [params])
        gate.set()
        assert submitted.result(timeout=60).tokens == 30
        passes = [event for event in submitted if isinstance(event, PassStats)]
        assert [done.sequences for done in passes].count(2) in (1, 2)
        shown += [*events]
        assert "".join(event.text for event in shown if isinstance(event, TextDelta)) == expected.text


def test_two_readers_share_passes(model: Path) -> None:
    params = replace(PARAMS, max_tokens=60)
    with tiny_engine(model, "none", budget=1, sequences=2) as engine, ThreadPoolExecutor(2) as pool:
        with engine._scheduler.paused():
            reading = [pool.submit(lambda ids: [*engine.stream(ids, params)], ids) for ids in ([5], [6, 7])]
            wait_until(lambda: len(engine._scheduler._waiting) == 2)
        for events in (found.result(timeout=60) for found in reading):
            passes = [event.sequences for event in events if isinstance(event, PassStats)]
            assert len(passes) == 60 and passes.count(2) >= 2, "those that may wait for a reader"


async def test_answers_in_a_loop(model: Path, hold_passes: Hold) -> None:
    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        expected = engine.generate(PROMPT, PARAMS)
        answer = engine.submit(PROMPT, PARAMS)
        text = "".join([event.text async for event in answer if isinstance(event, TextDelta)])
        assert text == expected.text and (await answer).token_ids == expected.token_ids
        many = await engine.agenerate_many([PROMPT, PROMPT[:9]], PARAMS)
        assert many[0].token_ids == expected.token_ids
        hold_passes(3)
        left = engine.submit(PROMPT, replace(PARAMS, max_tokens=200))
        async for event in left:
            if isinstance(event, TextDelta):
                left.cancel()
        assert 0 < (await left).tokens < 200 and (await left).finish_reason == "halted"


def test_closing_ends_running_and_queued_requests(model: Path, hold_passes: Hold) -> None:
    engine = tiny_engine(model, "none", budget=1, sequences=1)
    hold_passes(3)
    params = replace(PARAMS, max_tokens=200)
    running, waiting = engine.submit(PROMPT, params), engine.submit(PROMPT, params)
    _begun(running)
    engine.close()
    assert running.result(timeout=0).finish_reason == "halted"
    with pytest.raises(ClosedError):
        waiting.result(timeout=0)
    with pytest.raises(ClosedError):
        engine.submit(PROMPT, params)
    assert not [thread for thread in threading.enumerate() if thread.name == "offspec passes"]


def test_cancelling_a_single_sequence_cancels_its_pass(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, progressed = list[int](), RunningSequence.on_progress

    def cancelling(own: RunningSequence, layer: int, *given: Any) -> None:
        layers.append(layer)
        if layer == 1:
            answer.cancel()
        progressed(own, layer, *given)

    monkeypatch.setattr(RunningSequence, "on_progress", cancelling)
    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        with engine._scheduler.paused():  # the pass begins when the answer is known here
            (answer,) = ThreadPoolExecutor(1).map(partial(engine.submit, progress=True), [PROMPT], [PARAMS])
        result = answer.result(timeout=60)
        assert (result.finish_reason, result.tokens, max(layers)) == ("halted", 0, 1)
        assert [event.layer for event in answer if isinstance(event, PassProgress)] == [0, 0, 1]
        monkeypatch.undo()
        assert engine.generate(PROMPT, PARAMS).tokens == PARAMS.max_tokens


@pytest.mark.slow
def test_many_short_requests_leave_nothing_behind(model: Path) -> None:
    with tiny_engine(model, "suffix", budget=8, sequences=16) as engine:
        dice, seen = random.Random(1), list[tuple[int, int, int]]()
        for _ in range(5):
            prompts = [[dice.randrange(3, 93) for _ in range(dice.randrange(1, 30))] for _ in range(400)]
            results = engine.generate_many(prompts, replace(PARAMS, max_tokens=4))
            assert all(result.tokens == 4 for result in results)
            fds = len(os.listdir("/proc/self/fd"))
            seen.append((resident_bytes(), threading.active_count(), fds))
    assert {found[1:] for found in seen} == {seen[0][1:]}
    assert seen[-1][0] - seen[1][0] < 8 << 20


def test_an_engine_is_loaded_for_several(model: Path) -> None:
    given: Any = {"draft": "none", "dtype": "float32", "memory": "4GB", "context": 128}
    with offspec.load(model, sequences="auto", **given) as engine:
        assert engine.sequences == 8
        results = engine.generate_many([PROMPT[:n] for n in range(3, 13)], PARAMS)
    with offspec.load(model, **given) as engine:
        assert engine.sequences == 1
        alone = [engine.generate(PROMPT[:n], PARAMS) for n in range(3, 13)]
    assert [result.token_ids for result in results] == [result.token_ids for result in alone]


def test_a_short_prompt_does_not_wait_for_a_long_one(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_words: Callable[[int], tuple[list[int], list[int]]],
) -> None:
    """Both arrive together, the long prompt first."""
    monkeypatch.setattr(runner, "SHARED_PROMPT_ROWS", 8)
    prompts = [PROMPT * 2, [3, 4, 5, 6]]
    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        passes, spoken = first_words(2)
        results = [answer.result(timeout=60) for answer in _together(engine, prompts, PARAMS)]
        assert spoken == [1] and passes[0] == 2
        for prompt, result in zip(prompts, results, strict=True):
            assert result.token_ids == _anew(engine, prompt).token_ids


def test_a_queued_request_that_is_cancelled_ends_with_the_pass(
    model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request ends even if another is queued before it."""
    with tiny_engine(model, "none", budget=1, sequences=1) as engine:
        gate = hold_passes(2)
        running = engine.submit(PROMPT, replace(PARAMS, max_tokens=100))
        first, second = (engine.submit(PROMPT, PARAMS) for _ in range(2))
        _begun(running)
        second.cancel()
        step, ran = PassRunner.step, list[bool]()

        def counted(own: PassRunner, requests: list[RunningSequence]) -> list[list[Event]]:
            ran.append(second.done())
            return step(own, requests)

        monkeypatch.setattr(PassRunner, "step", counted)
        gate.set()
        with pytest.raises(RequestError, match="cancelled while queued"):
            second.result(timeout=60)
        assert running.result(timeout=60).tokens == 100
        assert first.result(timeout=60).tokens == PARAMS.max_tokens
        assert ran.count(False) <= 2


def test_a_prompt_that_is_cancelled_keeps_its_chunks(
    model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHARED_PROMPT_ROWS", 16)
    prompts = [[3, 4, 5], PROMPT * 3]
    with tiny_engine(model, "none", budget=1, sequences=2) as engine:
        gate = hold_passes(3)
        running, cancelled = _together(engine, prompts, replace(PARAMS, max_tokens=60))
        list(islice((event for event in running if isinstance(event, TextDelta)), 2))
        cancelled.cancel()
        gate.set()
        assert cancelled.result(timeout=60).tokens == 0
        again = engine.submit(prompts[1], PARAMS).result(timeout=60)
        assert 16 <= again.reused_tokens < len(prompts[1]) - 1
        assert running.result(timeout=60).tokens == 60
        assert again.token_ids == _anew(engine, prompts[1]).token_ids


def test_a_request_waiting_for_a_prefix_does_not_block_later_requests(
    model: Path, hold_passes: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHARED_PROMPT_ROWS", 16)
    long = [3 + (7 * i * i + i) % 90 for i in range(400)]
    with tiny_engine(model, "none", budget=1, sequences=3, context=512) as engine:
        gate = hold_passes(20)
        reading, same, short = _together(engine, [long, long, [3, 4, 5]], PARAMS)
        assert short.result(timeout=60).tokens == PARAMS.max_tokens
        assert not same.done()
        gate.set()
        alone = [reading.result(timeout=60), same.result(timeout=60)]
        assert alone[1].reused_tokens > len(long) - 256
        assert {result.token_ids for result in alone} == {_anew(engine, long).token_ids}


def test_closing_during_a_stream_fails_queued_requests(model: Path) -> None:
    engine = tiny_engine(model, "none", budget=1, sequences=1)
    events = engine.stream(PROMPT, PARAMS)
    next(events)
    (waiting,) = ThreadPoolExecutor(1).map(engine.submit, [PROMPT])
    engine.close()
    with pytest.raises(ClosedError):
        waiting.result(timeout=60)

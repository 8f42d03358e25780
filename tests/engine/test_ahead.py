"""Drafting while a pass is on its way changes no token, whatever was found when the pass ends, or fails."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.core.events import Event, Finished, Notice, PassProgress, PassStats
from offspec.core.trace import Timeline
from offspec.draft.grow.growing import Growing
from offspec.draft.lm import LMDrafter
from offspec.engine.ahead import DraftAhead
from offspec.engine.engine import Engine
from tests.support.products import some
from tests.support.tiny_models import disturb, tiny_engine, write_hybrid, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, a draft that agrees with it in part, one that never does, and one that carries states."""
    folder = tmp_path_factory.mktemp("models")
    target, near = (write_model(folder / name, num_hidden_layers=4) for name in ("target", "near"))
    disturb(near)
    hostile = write_model(folder / "hostile", "qwen2", seed=5)
    return {"target": target, "near": near, "hostile": hostile}


def _sampling(temperature: float, tokens: int = 24) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=11,
        max_tokens=tokens,
        ignore_eos=True,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        top_p=0.98,
    )


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[float, tuple[int, ...]]:
    with tiny_engine(models["target"], "none", budget=1) as engine:
        return {t: engine.generate(PROMPT, _sampling(t)).token_ids for t in (0.0, 1.0)}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The draft takes this number of steps beside every pass, however short that is."""
    count = [3]

    def goes_on(ahead: Any) -> bool:
        ahead.taken = getattr(ahead, "taken", -1) + 1
        return bool(ahead.taken < count[0])

    monkeypatch.setattr(DraftAhead, "_goes_on", goes_on)
    yield count


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many nodes the draft had expanded below each root, where it had."""
    seen = list[int]()
    begin = Growing.__init__

    def noted(self: Any, *args: Any) -> None:
        begin(self, *args)
        if args[-1] is not None:
            seen.append(len(args[-1].seen))

    monkeypatch.setattr(Growing, "__init__", noted)
    return seen


@contextmanager
def drafting_ahead(*args: Any, **options: Any) -> Iterator[Engine]:
    with tiny_engine(*args, **options) as engine:
        policy = engine.drafting.policy
        engine.follow(replace(policy, growth=replace(policy.growth, ahead=True)))
        yield engine


@pytest.mark.parametrize("count", [1, 6])
@pytest.mark.parametrize(("budget", "width"), some([(2, 1), (8, 4), (64, 8)], (8, 4)))
@pytest.mark.parametrize("draft", ["near", "hostile"])
def test_any_draft_and_budget(
    models: dict[str, Path],
    expected: dict[float, tuple[int, ...]],
    steps: list[int],
    carried: list[int],
    draft: str,
    budget: int,
    width: int,
    count: int,
) -> None:
    steps[0] = count
    with drafting_ahead(models["target"], models[draft], budget=budget, width=width) as engine:
        for temperature, tokens in expected.items():
            assert engine.generate(PROMPT, _sampling(temperature)).token_ids == tokens
        longer = engine.generate([*PROMPT, *expected[0.0][:5]], _sampling(0.0, 19))
        assert longer.token_ids[:1] == expected[0.0][5:6]
    if draft == "near" and budget == 64 and count == 6:
        assert carried, "some root was foreseen"


def test_some_roots_are_foreseen_and_begin_with_what_was_grown(
    models: dict[str, Path], expected: dict[float, tuple[int, ...]], steps: list[int], carried: list[int]
) -> None:
    steps[0] = 8
    timeline = Timeline(on=True)
    passes = list[PassStats]()
    with drafting_ahead(models["target"], models["near"], budget=8, width=4) as engine:
        engine._state._timeline = timeline
        for event in engine.stream(PROMPT, _sampling(0.0)):
            if isinstance(event, PassStats):
                passes.append(event)
    assert carried and max(carried) > 1
    assert all(one.hidden_seconds > 0 for one in passes[:-1])
    assert "ahead" in {record[0] for record in timeline._events}


@pytest.mark.parametrize("lookups", ["lookup", "suffix,lookup"])
def test_beside_lookups(
    models: dict[str, Path],
    expected: dict[float, tuple[int, ...]],
    steps: list[int],
    carried: list[int],
    lookups: str,
) -> None:
    """What they found is asked for anew when the text is known."""
    with drafting_ahead(models["target"], f"{models['near']},{lookups}", budget=24, width=4) as engine:
        for temperature, tokens in expected.items():
            for _ in range(2):  # the second time from memory
                assert engine.generate(PROMPT, _sampling(temperature)).token_ids == tokens
    assert carried


@pytest.mark.parametrize("draft", ["near", "auto", "hybrid"])
@pytest.mark.parametrize("target", some(["target", "hybrid"], "hybrid"))
def test_states_and_shared_rows(
    models: dict[str, Path], steps: list[int], tmp_path: Path, target: str, draft: str
) -> None:
    """Targets and drafts with states, and a draft whose rows give way to the target's."""
    hybrid = write_hybrid(tmp_path / "hybrid", "qwen3_5_text")
    folders = {**models, "hybrid": hybrid, "auto": "auto"}
    said = list[tuple[int, ...]]()
    for name, begin in (("none", tiny_engine), (folders[draft], drafting_ahead)):
        with begin(folders[target], name, budget=16, width=4) as engine:
            said += [engine.generate(PROMPT, _sampling(t, 16)).token_ids for t in (0.0, 1.0)]
    assert said[:2] == said[2:]


class _Failing:
    """A drafter that fails at a later step beside a pass, in a thread of its own."""

    def __init__(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, expand = 4, LMDrafter.expand

        def failing(drafter: LMDrafter, *args: Any) -> Any:
            if threading.current_thread().name == "offspec draft":
                self.left -= 1
                if self.left == 0:
                    raise error
            return expand(drafter, *args)

        monkeypatch.setattr(LMDrafter, "expand", failing)


def test_a_fault_of_the_draft_costs_no_answer(
    models: dict[str, Path],
    expected: dict[float, tuple[int, ...]],
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing, notices = _Failing(RuntimeError("a fault"), monkeypatch), list[tuple[str, str]]()

    def notify(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append((event.text, threading.current_thread().name))

    with drafting_ahead(models["target"], models["near"], budget=16, width=4, notify=notify) as engine:
        assert engine.generate(PROMPT, _sampling(1.0)).token_ids == expected[1.0]
        ((text, thread),) = notices
        assert "does not draft for the rest of this answer (RuntimeError: a fault)" in text
        assert thread == threading.current_thread().name, "told by the thread that answers"
        failing.left = -1
        assert engine.generate(PROMPT, _sampling(1.0)).token_ids == expected[1.0]


def test_halted_or_failing_in_mid_pass(
    models: dict[str, Path], expected: dict[float, tuple[int, ...]], steps: list[int]
) -> None:
    """The draft's thread ends with the pass, and the next answer is whole."""
    for layer in (1, 3):
        halt, told = threading.Event(), list[PassProgress]()

        def notify(event: Event, layer: int = layer, halt: Any = halt, told: Any = told) -> None:
            if isinstance(event, PassProgress) and event.index == 3 and event.layer == layer:
                told.append(event)
                halt.set()

        with drafting_ahead(models["target"], models["near"], budget=8, width=4, notify=notify) as engine:
            *_, last = engine.stream(PROMPT, _sampling(1.0), halt=halt)
            assert isinstance(last, Finished) and last.result.finish_reason == "halted" and told
            assert expected[1.0][: len(last.result.token_ids)] == last.result.token_ids
            assert not [thread for thread in threading.enumerate() if thread.name == "offspec draft"]
            assert engine.generate(PROMPT, _sampling(1.0)).token_ids == expected[1.0]
            mlp: Any = engine._assembly.target.skeleton.layers[2].mlp
            forward = mlp.forward
            mlp.forward = lambda *args: (_ for _ in ()).throw(KeyboardInterrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT, _sampling(1.0))
            mlp.forward = forward
            assert engine.generate(PROMPT, _sampling(1.0)).token_ids == expected[1.0]


def test_several_sequences_are_not_grown_on(
    models: dict[str, Path],
    expected: dict[float, tuple[int, ...]],
    steps: list[int],
) -> None:
    """Passes that several share go without; an answer that is left alone goes on with it."""
    with drafting_ahead(models["target"], models["near"], budget=16, width=4, sequences=2) as engine:
        answers = [engine.submit(PROMPT, _sampling(t, count)) for t in (0.0, 1.0) for count in (6, 24)]
        for answer, (temperature, count) in zip(
            answers, [(t, count) for t in (0.0, 1.0) for count in (6, 24)], strict=True
        ):
            assert answer.result().token_ids == expected[temperature][:count]


def test_the_number_of_threads_of_products_stays(
    models: dict[str, Path], expected: dict[float, tuple[int, ...]], steps: list[int]
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with drafting_ahead(models["target"], models["near"], budget=8, width=4) as engine:
            assert engine.generate(PROMPT, _sampling(0.0)).token_ids == expected[0.0]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

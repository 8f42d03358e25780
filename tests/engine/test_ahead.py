"""Drafting while a pass is on its way changes no token, whatever was found when the pass ends, or fails."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec.core.events import Event, Finished, Notice, PassProgress, PassStats
from offspec.core.trace import Timeline
from offspec.draft.grow.growing import Growing
from offspec.draft.lm import LMDrafter
from offspec.engine.batch import DraftAhead
from offspec.engine.engine import Engine
from tests.support.answers import PROMPT, Trio, sampling, says
from tests.support.products import some
from tests.support.tiny_models import tiny_engine, write_hybrid

Expected = dict[float, tuple[int, ...]]
pytestmark = pytest.mark.usefixtures("drafters_stay")


@pytest.fixture(scope="module")
def expected(trio: Trio) -> Expected:
    return dict(zip((0.0, 1.0), says(trio.target, sampling(0.0, 24), sampling(1.0, 24)), strict=True))


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The draft takes this number of steps beside every pass, however short that is, and none waits long.

    With a low priority its thread would hardly run on a machine that others use.
    """
    count = [3]

    def goes_on(ahead: Any) -> bool:
        ahead.taken = getattr(ahead, "taken", -1) + 1
        return bool(ahead.taken < count[0])

    monkeypatch.setattr(DraftAhead, "_goes_on", goes_on)
    monkeypatch.setattr(os, "setpriority", lambda *given: None)
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
    with tiny_engine(*args, **{"budget": 16, "width": 4} | options) as engine:
        policy = engine.drafting.policy
        engine.follow(replace(policy, growth=replace(policy.growth, ahead=True)))
        yield engine


@pytest.mark.parametrize(
    ("draft", "budget", "width", "count"),
    some(
        [("near", 64, 8, 6), ("near", 8, 4, 1), ("hostile", 8, 4, 6), ("hostile", 2, 1, 1)],
        ("near", 8, 4, 1),
        ("hostile", 8, 4, 6),
    ),
)
def test_any_draft_and_budget(
    trio: Trio, expected: Expected, steps: list[int], carried: list[int], draft: str, budget: int, width: int,
    count: int,
) -> None:  # fmt: skip
    steps[0] = count
    with drafting_ahead(trio.target, getattr(trio, draft), budget=budget, width=width) as engine:
        for temperature, tokens in expected.items():
            assert engine.generate(PROMPT, sampling(temperature, 24)).token_ids == tokens
        longer = engine.generate([*PROMPT, *expected[0.0][:5]], sampling(0.0, 19))
        assert longer.token_ids == expected[0.0][5:]
    assert carried or (draft, budget) != ("near", 64), "some root was foreseen"


def test_some_roots_are_foreseen_and_begin_with_what_was_grown(
    trio: Trio, steps: list[int], carried: list[int]
) -> None:
    steps[0] = 8
    with drafting_ahead(trio.target, trio.near, budget=8) as engine:
        engine._states.first.timeline = timeline = Timeline(on=True)
        events = list(engine.stream(PROMPT, sampling(0.0, 24)))
    passes = [event for event in events if isinstance(event, PassStats)]
    assert max(carried) > 1
    assert all(one.hidden_seconds > 0 for one in passes[:-1])
    assert "ahead" in {record[0] for record in timeline._events}


def test_beside_lookups(trio: Trio, expected: Expected, carried: list[int]) -> None:
    """What they found is asked for anew when the text is known."""
    with drafting_ahead(trio.target, f"{trio.near},suffix,lookup", budget=24) as engine:
        for temperature, tokens in expected.items():
            for _ in range(2):  # the second time from memory
                assert engine.generate(PROMPT, sampling(temperature, 24)).token_ids == tokens
    assert carried


@pytest.mark.parametrize(
    ("target", "draft"),
    some(
        [("hybrid", "hybrid"), ("hybrid", "auto"), ("target", "auto"), ("target", "hybrid")],
        ("hybrid", "auto"),
        ("target", "hybrid"),
    ),
)
def test_states_and_shared_rows(trio: Trio, tmp_path: Path, target: str, draft: str) -> None:
    """Targets and drafts with states, and a draft whose rows give way to the target's."""
    hybrid = write_hybrid(tmp_path / "hybrid", "qwen3_5_text")
    folder = hybrid if target == "hybrid" else trio.target
    params = [sampling(temperature) for temperature in (0.0, 1.0)]
    with drafting_ahead(folder, hybrid if draft == "hybrid" else draft) as engine:
        assert [engine.generate(PROMPT, one).token_ids for one in params] == says(folder, *params)


def test_a_fault_of_the_draft_costs_no_answer(
    trio: Trio, expected: Expected, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, expand, notices = 4, LMDrafter.expand, list[tuple[str, str]]()

    def failing(drafter: LMDrafter, *args: Any) -> Any:
        nonlocal left
        if threading.current_thread().name == "offspec draft":
            left -= 1
            if left == 0:
                raise RuntimeError("a fault")
        return expand(drafter, *args)

    def notify(event: Event) -> None:
        if isinstance(event, Notice):
            notices.append((event.text, threading.current_thread().name))

    monkeypatch.setattr(LMDrafter, "expand", failing)
    with drafting_ahead(trio.target, trio.near, notify=notify) as engine:
        assert engine.generate(PROMPT, sampling(1.0, 24)).token_ids == expected[1.0]
        ((text, thread),) = notices
        assert "does not draft for the rest of this answer (RuntimeError: a fault)" in text
        assert thread == "offspec passes"
        assert engine.generate(PROMPT, sampling(1.0, 24)).token_ids == expected[1.0]


@pytest.mark.parametrize("layer", some([1, 3], 1))
def test_halted_or_failing_in_mid_pass(trio: Trio, expected: Expected, layer: int) -> None:
    """The draft's thread ends with the pass, and the next answer is whole."""
    halt, params = threading.Event(), sampling(1.0, 24)

    def notify(event: Event) -> None:
        if isinstance(event, PassProgress) and event.index == 3 and event.layer == layer:
            halt.set()

    with drafting_ahead(trio.target, trio.near, budget=8, notify=notify) as engine:
        *_, last = engine.stream(PROMPT, params, halt=halt)
        assert isinstance(last, Finished) and last.result.finish_reason == "halted"
        assert expected[1.0][: len(last.result.token_ids)] == last.result.token_ids
        assert not [thread for thread in threading.enumerate() if thread.name == "offspec draft"]
        assert engine.generate(PROMPT, params).token_ids == expected[1.0]
        with pytest.MonkeyPatch.context() as patch:
            mlp: Any = engine._assembly.target.skeleton.layers[2].mlp
            patch.setattr(mlp, "forward", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                engine.generate(PROMPT, params)
        assert engine.generate(PROMPT, params).token_ids == expected[1.0]


def test_several_sequences_are_not_grown_on(trio: Trio, expected: Expected) -> None:
    """Passes that several share go without; an answer that is left alone goes on with it."""
    asked = [(temperature, count) for temperature in (0.0, 1.0) for count in (6, 24)]
    with drafting_ahead(trio.target, trio.near, sequences=2) as engine:
        answers = [engine.submit(PROMPT, sampling(*one)) for one in asked]
        for answer, (temperature, count) in zip(answers, asked, strict=True):
            assert answer.result().token_ids == expected[temperature][:count]


def test_the_number_of_threads_of_products_stays(trio: Trio, expected: Expected) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with drafting_ahead(trio.target, trio.near, budget=8) as engine:
            assert engine.generate(PROMPT, sampling(0.0, 24)).token_ids == expected[0.0]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

"""Drafting during a pass changes no token, even if the pass fails."""

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
from offspec.draft.grow.tree_grower import TreeGrower
from offspec.draft.lm import LMDrafter
from offspec.engine.batched_pass import DraftAhead
from offspec.engine.engine import Engine
from tests.support.answers import PROMPT, TargetAndDrafts, generate_tokens, sampling
from tests.support.exhaustive import sampled_params
from tests.support.tiny_models import tiny_engine, write_hybrid

Expected = dict[float, tuple[int, ...]]
pytestmark = pytest.mark.usefixtures("drafters_stay")


@pytest.fixture(scope="module")
def expected(trio: TargetAndDrafts) -> Expected:
    return dict(
        zip((0.0, 1.0), generate_tokens(trio.target, sampling(0.0, 24), sampling(1.0, 24)), strict=True)
    )


@pytest.fixture(autouse=True)
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of draft steps during every pass, regardless of the pass's duration.

    The thread keeps its priority, since a low one would hardly run on a busy machine.
    """
    count = [3]

    def should_continue(ahead: Any) -> bool:
        ahead.taken = getattr(ahead, "taken", -1) + 1
        return bool(ahead.taken < count[0])

    monkeypatch.setattr(DraftAhead, "_should_continue", should_continue)
    monkeypatch.setattr(os, "setpriority", lambda *given: None)
    yield count


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of nodes expanded below each new root, for roots with any."""
    seen = list[int]()
    begin = TreeGrower.__init__

    def noted(self: Any, *args: Any) -> None:
        begin(self, *args)
        if args[-1] is not None:
            seen.append(len(args[-1].predictions))

    monkeypatch.setattr(TreeGrower, "__init__", noted)
    return seen


@contextmanager
def drafting_ahead(*args: Any, **options: Any) -> Iterator[Engine]:
    with tiny_engine(*args, **{"budget": 16, "width": 4} | options) as engine:
        policy = engine.drafting.policy
        engine.set_draft_policy(replace(policy, growth=replace(policy.growth, ahead=True)))
        yield engine


@pytest.mark.parametrize(
    ("draft", "budget", "width", "count"),
    sampled_params(
        [("near", 64, 8, 6), ("near", 8, 4, 1), ("hostile", 8, 4, 6), ("hostile", 2, 1, 1)],
        ("near", 8, 4, 1),
        ("hostile", 8, 4, 6),
    ),
)
def test_any_draft_and_budget(
    trio: TargetAndDrafts, expected: Expected, steps: list[int], carried: list[int], draft: str, budget: int,
    width: int, count: int,
) -> None:  # fmt: skip
    steps[0] = count
    with drafting_ahead(trio.target, getattr(trio, draft), budget=budget, width=width) as engine:
        for temperature, tokens in expected.items():
            assert engine.generate(PROMPT, sampling(temperature, 24)).token_ids == tokens
        longer = engine.generate([*PROMPT, *expected[0.0][:5]], sampling(0.0, 19))
        assert longer.token_ids == expected[0.0][5:]
    assert carried or (draft, budget) != ("near", 64), "some root was drafted ahead"


def test_some_roots_are_drafted_ahead_and_keep_their_nodes(
    trio: TargetAndDrafts, steps: list[int], carried: list[int]
) -> None:
    steps[0] = 8
    with drafting_ahead(trio.target, trio.near, budget=8) as engine:
        engine._states.first.timeline = timeline = Timeline(on=True)
        events = list(engine.stream(PROMPT, sampling(0.0, 24)))
    passes = [event for event in events if isinstance(event, PassStats)]
    assert max(carried) > 1
    assert all(one.hidden_seconds > 0 for one in passes[:-1])
    assert "ahead" in {record[0] for record in timeline._events}


def test_with_lookups(trio: TargetAndDrafts, expected: Expected, carried: list[int]) -> None:
    """Lookups are queried again once the accepted text is known."""
    with drafting_ahead(trio.target, f"{trio.near},suffix,lookup", budget=24) as engine:
        for temperature, tokens in expected.items():
            for _ in range(2):  # the second time from memory
                assert engine.generate(PROMPT, sampling(temperature, 24)).token_ids == tokens
    assert carried


@pytest.mark.parametrize(
    ("target", "draft"),
    sampled_params(
        [("hybrid", "hybrid"), ("hybrid", "auto"), ("target", "auto"), ("target", "hybrid")],
        ("hybrid", "auto"),
        ("target", "hybrid"),
    ),
)
def test_states_and_shared_rows(trio: TargetAndDrafts, tmp_path: Path, target: str, draft: str) -> None:
    """Recurrent targets and drafts, and a draft whose KV cache is replaced by the target's."""
    hybrid = write_hybrid(tmp_path / "hybrid", "qwen3_5_text")
    folder = hybrid if target == "hybrid" else trio.target
    params = [sampling(temperature) for temperature in (0.0, 1.0)]
    with drafting_ahead(folder, hybrid if draft == "hybrid" else draft) as engine:
        assert [engine.generate(PROMPT, one).token_ids for one in params] == generate_tokens(folder, *params)


def test_a_fault_of_the_draft_costs_no_answer(
    trio: TargetAndDrafts, expected: Expected, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("layer", sampled_params([1, 3], 1))
def test_halted_or_failing_in_mid_pass(trio: TargetAndDrafts, expected: Expected, layer: int) -> None:
    """The draft's thread ends with the pass, and the next answer is correct."""
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


def test_shared_passes_do_not_draft_ahead(trio: TargetAndDrafts, expected: Expected) -> None:
    """Shared passes do not draft ahead; the last remaining answer does again."""
    asked = [(temperature, count) for temperature in (0.0, 1.0) for count in (6, 24)]
    with drafting_ahead(trio.target, trio.near, sequences=2) as engine:
        answers = [engine.submit(PROMPT, sampling(*one)) for one in asked]
        for answer, (temperature, count) in zip(answers, asked, strict=True):
            assert answer.result().token_ids == expected[temperature][:count]


def test_the_number_of_threads_of_products_stays(trio: TargetAndDrafts, expected: Expected) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with drafting_ahead(trio.target, trio.near, budget=8) as engine:
            assert engine.generate(PROMPT, sampling(0.0, 24)).token_ids == expected[0.0]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

"""The sweep over budgets and widths: its order, its arithmetic, its map, and all of it on a tiny model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lib.report import Prompt, Report
from bench.plan import sweep as plan_sweep
from bench.plan.cases import Target
from bench.plan.sweep_figures import Answer, Pair, summarise
from offspec.checkpoint import open_checkpoint
from offspec.core.config import SamplingParams
from offspec.core.events import Event, PassStats, TextDelta
from offspec.draft.grow.best_first import GrowthPolicy
from offspec.engine import rehearsal as planning
from offspec.plan.policy import DraftPolicy
from offspec_planners.placement import Placement
from offspec_planners.plan import Plan
from tests.support.bench_runs import RunBench
from tests.support.sample_plans import small
from tests.support.tiny_models import write_model

PAIRS = [(16, 4), (16, 8), (64, 4), (64, 8)]


def test_the_plan_is_first_last_and_between() -> None:
    found = plan_sweep.order(PAIRS, 3, random.Random(1))
    assert [place for place, pair in enumerate(found) if pair is None] == [0, 3, 6]
    assert sorted(pair for pair in found if pair is not None) == PAIRS
    assert plan_sweep.order(PAIRS, 1, random.Random(1)).count(None) == 1
    assert len({tuple(plan_sweep.order(PAIRS, 2, random.Random(seed))) for seed in range(9)}) > 1


def test_only_what_was_in_every_round_can_be_best() -> None:
    answers = [
        Answer(0, None, 40, 4, 4.0),
        Answer(0, None, 40, 4, 5.0),
        Answer(1, None, 30, 2, 5.0),
        Answer(0, (16, 4), 60, 6, 5.0),
        Answer(1, (16, 4), 60, 6, 10.0),
        Answer(0, (64, 4), 900, 9, 1.0),
        Answer(0, (64, 8), 20, 2, 4.0),
        Answer(1, (64, 8), 40, 2, 4.0),
    ]
    found = summarise(answers)
    assert found["rounds"] == 2
    assert found["chosen"]["tok_per_s"] == pytest.approx(110 / 14)
    assert found["chosen"]["tokens_per_pass"] == 11.0
    assert (found["best"]["budget"], found["best"]["tok_per_s"]) == (16, 8.0)
    assert found["of_best"] == pytest.approx(110 / 14 / 8)
    assert found["of_top_three"] == pytest.approx(110 / 14 / 7.75)
    assert found["noise"] == pytest.approx((2.0 / 9.0 + 0.0) / 2)
    assert [cell["rounds"] for cell in found["cells"]] == [2, 1, 2]


class ScriptedEngine:
    """Every pass yields as many tokens as its tree has nodes to a step; counts what is asked."""

    def __init__(self) -> None:
        self.policy = DraftPolicy(GrowthPolicy(1, 1))
        self.asked: list[Pair] = []
        self.closed = 0

    def follow(self, policy: DraftPolicy) -> None:
        self.policy = policy

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[Event]:
        self.asked.append((self.policy.growth.budget, self.policy.growth.width))
        try:
            for index in range(1000):
                yield TextDelta("", ())
                yield PassStats(index, 8, 3, 2, self.policy.growth.width, 0.5, 0.5, 100)
        finally:
            self.closed += 1


def test_an_answer_is_whole_passes_and_is_broken_off() -> None:
    engine = ScriptedEngine()
    engine.follow(DraftPolicy(GrowthPolicy(16, 5)))
    tokens, passes, seconds = plan_sweep.answer(engine, "why", SamplingParams(), 12)
    assert (tokens, passes, engine.closed) == (15, 3, 1)
    assert seconds > 0


def test_what_is_far_behind_is_left_out_and_time_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, clock = ScriptedEngine(), SimpleNamespace(now=0.0)

    def answer(engine: Any, prompt: str, params: SamplingParams, tokens: int) -> tuple[int, int, float]:
        clock.now += 10.0
        engine.asked.append((engine.policy.growth.budget, engine.policy.growth.width))
        return 100, 10, 10.0 if engine.policy.growth.budget == 64 else 20.0

    monkeypatch.setattr(plan_sweep, "answer", answer)
    monkeypatch.setattr("bench.plan.sweep.time.perf_counter", lambda: clock.now)
    args = plan_sweep.main.parser().parse_args(
        ["--budgets", "16", "64", "--widths", "4", "32", "--repeats", "2", "--minutes", "1"]
    )
    planned, prompts = DraftPolicy(GrowthPolicy(24, 6)), [Prompt(str(i), "chat", "?") for i in range(9)]
    answers = plan_sweep.measure(engine, planned, args, prompts, Report())
    rounds = [[a.pair for a in answers if a.turn == turn and a.pair] for turn in range(9)]
    assert sorted(rounds[0]) == [(16, 4), (64, 4), (64, 32)], "a step is never wider than a tree"
    assert sorted(rounds[1]) == [(64, 4), (64, 32)]
    assert not any(rounds[2:]), "time was up after the first round"
    assert sum(a.pair is None for a in answers) == 4
    assert engine.asked.count((24, 6)) == 6, "the plan's way carries the prompt too"


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan for a tiny model, which the bench then finds."""
    folder = write_model(tmp_path / "model", seed=1)
    made = replace(
        small(),
        target=str(folder),
        target_print=open_checkpoint(str(folder)).fingerprint,
        draft="auto",
        placement=Placement.in_memory(3, range(3), 0),
        draft_mode="expanded",
        context=500,
        budget=24,
        width=6,
    )
    monkeypatch.setattr(planning, "make_plan", lambda config, replan: made)
    monkeypatch.setattr(Target, "widened", lambda model, factor: Target(model))
    return made


def test_all_of_it_on_a_tiny_model(planned: Plan, run_bench: RunBench) -> None:
    grid = [
        "--budgets",
        "16",
        "32",
        "--widths",
        "4",
        "8",
        "--prompts",
        "2",
        "--tokens",
        "6",
        "--repeats",
        "2",
    ]
    ran = run_bench(plan_sweep.main, "--model", planned.target, "--memory", "3GB", "--keep", "0", *grid)
    last = ran.summary
    assert ran.code == (0 if last["of_best"] >= 0.95 else 1)
    assert (last["rounds"], len(last["cells"]), last["plan"]["budget"]) == (2, 4, 24)
    assert all(cell["tokens_per_pass"] >= 1 and cell["rounds"] == 2 for cell in last["cells"])
    assert len(ran.record["cases"][0]["answers"]) == 2 * (4 + 2)
    assert "plan" in ran.plot.read_text()

"""When a step pays, how many nodes do, and a replay that says what growing would have done."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.draft.grow.best_first import GrowthPolicy, grow
from offspec.draft.grow.result import GrownTree
from offspec.draft.mix.mixture import Mixture
from offspec_planners.best_first import Growing, Grown, best_size, replay, worth_a_step
from offspec_planners.cost import PassCosts
from tests.planners.cost_draws import COSTS, SECONDS
from tests.support.table_drafter import TableDrafter, greedy_scorer, random_table

WORDS = 12


@given(st.lists(st.floats(-12.0, 0.0), max_size=60), SECONDS, COSTS)
def test_the_best_size_is_that_of_an_obvious_loop(found: list[float], draft: float, costs: PassCosts) -> None:
    scores = [0.0, *sorted(found, reverse=True)]
    rates, expected = [], 0.0
    for rows, score in enumerate(scores, 1):
        expected += np.exp(score)
        rates.append(expected / float(costs.iteration(draft, rows)))
    size = best_size(np.array(scores), draft, costs)
    assert rates[size - 1] == pytest.approx(max(rates), rel=1e-12)


@given(st.floats(0.0, 20.0), st.floats(1.0, 30.0), SECONDS, st.integers(1, 64), st.integers(1, 900), COSTS)
def test_growth_goes_on_while_a_step_can_raise_the_rate(
    worth: float, expected: float, draft: float, width: int, rows: int, costs: PassCosts
) -> None:
    now = expected / costs.iteration(draft, rows)
    then = (expected + worth) / costs.iteration(draft + costs.step_seconds(width), rows)
    if abs(now - then) > 1e-9 * now:
        assert worth_a_step(worth, expected, draft, width, rows, costs) == (then > now)


def _grow(table: torch.Tensor, policy: GrowthPolicy, depth: int = 20) -> tuple[GrownTree, list[int]]:
    drafter = TableDrafter(table)
    growth = grow(Mixture.single(drafter, greedy_scorer(len(table))), [0, 2], policy, depth)
    growth.tree.check()
    return growth, [len(nodes) for nodes in drafter.steps]


def _same(growth: GrownTree, widths: list[int], replayed: Growing) -> None:
    assert list(replayed.widths) == widths and len(widths) == growth.steps
    assert replayed.nodes == len(growth.tree)
    assert replayed.expected == pytest.approx(growth.tree.expected_tokens, rel=1e-5)
    assert replayed.depth == growth.tree.depth.max()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    budget=st.integers(1, 60),
    width=st.integers(1, 8),
    min_gain=st.sampled_from([0.0, 0.01, 0.1]),
    costs=st.none() | COSTS,
)
def test_a_replay_is_the_growth(
    seed: int, budget: int, width: int, min_gain: float, costs: PassCosts | None
) -> None:
    """The record holds every node that a smaller growth looks at: all of a tree of few levels."""
    table, depth = random_table(seed, size=8), 3
    every = sum(len(table) ** level for level in range(depth + 1))
    whole, _ = _grow(table, GrowthPolicy(every, 64, min_gain=0.0), depth)
    assert len(whole.tree) == every
    record = Grown(whole.tree.parent.astype(np.int32), whole.tree.score.astype(np.float32))
    growth, widths = _grow(table, GrowthPolicy(budget, width, min_gain, costs), depth)
    _same(growth, widths, replay(record, budget, width, costs, min_gain, depth))


def test_a_recorded_tree_can_be_replayed() -> None:
    """The record is what a growth of its size makes, and of it only the best are verified.

    Poor nodes that only the first steps of a growth expand are not in it, so now and then, by the draft,
    the growth is a step behind its replay. It is never ahead of it.
    """
    off, budget, width = [], 16, 8
    for seed in range(20):
        table = random_table(seed, size=WORDS)
        recording, _ = _grow(table, GrowthPolicy(budget, width, min_gain=0.0, record=300), depth=300)
        assert len(recording.tree) == budget and recording.recorded is not None
        assert len(recording.recorded.parent) == 300
        growth, _ = _grow(table, GrowthPolicy(budget, width), depth=300)
        replayed = replay(recording.recorded, budget, width, None)
        assert recording.tree.expected_tokens >= growth.tree.expected_tokens * (1 - 1e-6)
        off.append(replayed.expected / growth.tree.expected_tokens - 1)
    assert min(off) > -1e-6
    assert np.quantile(off, 0.9) < 1e-6 and max(off) < 0.02


def test_a_sure_draft_grows_deep() -> None:
    """Two tokens that follow each other almost surely: hopeless nodes beside them take no steps away."""
    growth, widths = _grow(random_table(300, size=WORDS), GrowthPolicy(16, 8))
    assert growth.tree.expected_tokens > 14 and growth.tree.depth.max() > 13
    assert sum(widths) < 40


def test_no_record_of_a_tree_that_the_depth_cut_short() -> None:
    table = random_table(0, 4.0, WORDS)
    growth, _ = _grow(table, GrowthPolicy(8, 4, min_gain=0.0, record=60), depth=2)
    assert growth.recorded is None


def test_damaged_trees_are_refused() -> None:
    good = Grown(np.array([-1, 0, 1], np.int32), np.array([0, -0.5, -2.25], np.float32)).to_json()
    again = Grown.from_json(good)
    assert again.parent.tolist() == [-1, 0, 1] and again.score.tolist() == [0, -0.5, -2.25]
    assert again.depth().tolist() == [0, 1, 2]
    for key, value in (
        ("parent", [-1, 1, 0]),
        ("parent", [-1, -1, 0]),
        ("parent", [-1, 0.5, 0]),
        ("parent", []),
        ("parent", "root"),
        ("score", [0, -1]),
        ("score", [0, -1, -0.5]),
        ("score", [-1, -1, -2]),
        ("score", [0, -1, "low"]),
    ):
        with pytest.raises(ValueError, match=f"^{key} is .* it should be"):
            Grown.from_json({**good, key: value})

"""Tree sizes and widths for one or several sequences: replays compared with slow reference versions."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offspec_planners.acceptance import Calibration, typical
from offspec_planners.cost import PassCosts
from offspec_planners.expert_costs import ExpertCosts
from offspec_planners.plan.forecast import Shared, knee
from offspec_planners.search import (
    BUDGETS,
    best,
    budgets_for,
    forecast_speed,
    shared_budgets,
    static_sweep,
    sweep,
)
from offspec_planners.sequoia import choose_tree_shape
from offspec_planners.tree_growth import GrowthOutcome, RecordedTree, max_expanded, replay
from offspec_planners.typical_acceptance import MODEL
from tests.support.sample_plans import COSTS

_FLAT = PassCosts(compute=((1, 1.0), (1024, 1.0)), step=((1, 0.01), (64, 0.01)))
_STEEP = PassCosts(compute=((1, 0.1), (1024, 102.4)), step=((1, 0.01), (64, 0.01)))
_FREE = PassCosts(compute=((1, 1.0),), step=((1, 0.0),))


@pytest.fixture(scope="module")
def known() -> Calibration:
    return typical(MODEL)


def _tree(seed: int, nodes: int) -> RecordedTree:
    """A random tree with some paths that are nearly certain."""
    random = np.random.default_rng(seed)
    parent, score = [-1], [0.0]
    for node in range(1, nodes):
        parent.append(int(random.integers(max(0, node - 6), node)))
        score.append(score[parent[-1]] + min(0.0, math.log(random.random() + 0.3)))
    return RecordedTree(np.array(parent, np.int32), np.array(score, np.float32))


def _slow_replay(trees: list[RecordedTree], budget: int, width: int, costs: PassCosts) -> GrowthOutcome:
    """Reference version of `replay`, node by node."""
    nodes = [(tree, node) for tree in range(len(trees)) for node in range(len(trees[tree].parent))]
    worth = {at: math.exp(float(trees[at[0]].score[at[1]])) for at in nodes}
    order = {
        at: place
        for place, at in enumerate(
            sorted(nodes, key=lambda at: (at[1] > 0, -float(trees[at[0]].score[at[1]]), at))
        )
    }

    def rate(kept: list[tuple[int, int]], rows: int, draft: float) -> float:
        return sum(worth[at] for at in kept[:rows]) / float(costs.iteration(draft, rows))

    def rows_of(kept: list[tuple[int, int]], draft: float) -> int:
        return max(range(len(trees), len(kept) + 1), key=lambda rows: (rate(kept, rows, draft), -rows))

    expanded, widths, draft = set[tuple[int, int]](), list[int](), costs.start
    kept = [(tree, 0) for tree in range(len(trees))]
    while sum(widths) + len(trees) * width <= max_expanded(budget, len(trees) * width):
        step = [
            at
            for tree in range(len(trees))
            for at in [found for found in kept if found[0] == tree and found not in expanded][:width]
        ]
        step = [at for at in step if worth[at] * budget >= 0.01 * sum(worth[other] for other in kept)]
        if not step:
            break
        if widths:
            rows, more = rows_of(kept, draft), sum(worth[at] for at in step)
            now = float(costs.iteration(draft, rows))
            then = float(costs.iteration(draft + float(costs.step_seconds(len(step))), rows))
            hidden = costs.iteration(draft + costs.step_seconds(len(step)), len(kept)) <= costs.link
            if not hidden and rate(kept, rows, draft) * now + more <= rate(kept, rows, draft) * then:
                break
        expanded.update(step)
        widths.append(len(step))
        draft += float(costs.step_seconds(len(step)))
        reached = [
            (tree, node) for tree, node in nodes if not node or (tree, trees[tree].parent[node]) in expanded
        ]
        kept = sorted(reached, key=order.__getitem__)[:budget]
    size = rows_of(kept, draft)
    depth = [max(trees[tree].depth()[n] for t, n in kept[:size] if t == tree) for tree in range(len(trees))]
    return GrowthOutcome(
        tuple(widths), size, sum(worth[at] for at in kept[:size]), round(float(np.mean(depth)))
    )


@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 4),
    share=st.integers(1, 12),
    width=st.integers(1, 5),
    row=st.sampled_from([0.0, 0.01, 0.2]),
    link=st.sampled_from([0.0, 1.5, 4.0]),
)
def test_forest_growth_equals_a_plain_loop(
    seed: int, count: int, share: int, width: int, row: float, link: float
) -> None:
    costs = PassCosts(((1, 1.0), (101, 1.0 + 100 * row)), ((1, 0.1), (65, 0.5)), start=0.05, link=link)
    trees = [_tree(seed + place, 25 + place) for place in range(count)]
    found, wanted = (
        replay(tuple(trees), count * share, width, costs),
        _slow_replay(trees, count * share, width, costs),
    )
    assert found.expected == pytest.approx(wanted.expected)
    assert (found.widths, found.nodes, found.depth) == (wanted.widths, wanted.nodes, wanted.depth)


def test_equal_trees_get_equal_shares(known: Calibration) -> None:
    """With equal trees, each sequence gets the same as alone with its share of the tree size."""
    same = Calibration(forest=known.forest[:1])
    for count in (2, 8):
        alone, together = (
            forecast_speed(same, _FREE, 24, 8),
            forecast_speed(same, _FREE, 24 * count, 8, count),
        )
        assert together.choice.tokens_per_pass == pytest.approx(count * alone.choice.tokens_per_pass)
        assert (together.nodes, together.depth) == (count * alone.nodes, alone.depth)


def test_every_sequence_has_a_root_and_one_sequence_changes_nothing() -> None:
    assert COSTS.for_sequences(1) is COSTS
    assert [budgets_for(1, most) for most in (1, 64, 9999)] == [[1], [*BUDGETS[:6]], [*BUDGETS]]
    assert shared_budgets(1) == []
    assert budgets_for(8, 40) == [8, 16, 24, 32] and budgets_for(100, 16) == [100]
    assert budgets_for(2, 4096)[-1] == 2048 and shared_budgets(64) == [4096, 3072, 2048, 1536]
    roots = forecast_speed(Calibration(), COSTS, 8, 1, 8)
    seconds = float(COSTS.iteration(0.0, 8))
    assert (roots.nodes, roots.draft, roots.choice.tokens_per_pass) == (8, 0.0, 8.0)
    assert roots.choice.tok_per_s == pytest.approx(8 / seconds)


def test_speed_without_drafts_is_the_roofline() -> None:
    """The link bounds up to the rows that compute in parallel; then each row adds its time."""
    costs = PassCosts(((1, 0.01), (101, 1.01)), ((1, 0.0),), link=0.5)
    for count in (1, 10, 49, 51, 64, 400):
        found = forecast_speed(Calibration(), costs, count, 1, count).choice.tok_per_s
        assert found == pytest.approx(count / max(0.5, 0.01 * count))


def test_costs_per_sequence_are_not_shared() -> None:
    costs = replace(COSTS, caches=0.1)
    for count in (2, 5):
        shared = costs.for_sequences(count)
        assert shared.start == count * costs.start
        assert shared.link == pytest.approx(costs.link + (count - 1) * 0.1)
        assert shared.rest == pytest.approx(costs.rest + (count - 1) * 0.1)
        assert shared.compute_seconds(64) == costs.compute_seconds(64)
        assert shared.step_seconds(32) == costs.step_seconds(32)


def test_sequences_need_different_experts() -> None:
    """Rows of a tree choose similar experts: those of n trees need more than the same number of one tree."""
    alike = ExpertCosts(10, 64, 4, ((0.2, 0.001),), spread=((1, 0.5), (2048, 0.5)))
    for count in (2, 8):
        shared = alike.for_sequences(count)
        for rows in (1, 2, 16, 128):  # of each; these stand for the square root of them
            wanted = 64 * (1 - (1 - 4 / 64) ** (count * math.sqrt(rows)))
            assert float(shared.distinct_experts(count * rows)) == pytest.approx(wanted, rel=1e-3)
        assert float(shared.distinct_experts(16 * count)) > float(alike.distinct_experts(16 * count))
    by_chance = ExpertCosts(10, 64, 4, ((0.2, 0.001),))
    assert by_chance.for_sequences(8) == by_chance


def test_knee_is_where_the_gain_drops_below_half() -> None:
    def rows(*found: tuple[int, float]) -> tuple[Shared, ...]:
        return tuple(Shared(count, 256, speed, 1.0, 1.0, 1.0, 0) for count, speed in found)

    assert knee(rows((1, 1.0), (2, 1.9), (4, 3.5), (8, 5.0), (16, 9.9))) == 4
    assert knee(rows((1, 1.0), (2, 1.5), (3, 1.9))) is None  # three give half more than two, at no cost
    assert knee(rows((1, 1.0), (2, 1.5), (3, 1.8))) == 2
    assert knee(rows((1, 1.0), (2, 1.4))) == 1
    assert knee(rows((8, 4.0))) is None


def test_cheap_nodes_give_large_trees_and_expensive_ones_small(known: Calibration) -> None:
    budgets, widths = (1, 16, 64, 256), (4, 32)
    assert best(sweep(known, _FLAT, budgets, widths)).choice.budget == 256
    assert best(sweep(known, _STEEP, budgets, widths)).choice.budget == 1


def test_widths_are_no_larger_than_budgets(known: Calibration) -> None:
    rows = sweep(known, _FLAT, (1, 8, 16), (4, 16))
    assert [(row.choice.budget, row.choice.width) for row in rows] == [(1, 1), (8, 4), (16, 4), (16, 16)]


def test_pass_without_draft_tokens_yields_one_token(known: Calibration) -> None:
    alone = forecast_speed(known, _FLAT, 1, 1)
    assert (alone.choice.tokens_per_pass, alone.choice.seconds_per_pass, alone.draft) == (1.0, 1.0, 0.0)


def test_observed_tokens_correct_the_forecast(known: Calibration) -> None:
    worse = Calibration(forest=known.forest, expected=1000.0, observed=500.0)
    share = (
        forecast_speed(worse, _FLAT, 64, 8).choice.tok_per_s
        / forecast_speed(known, _FLAT, 64, 8).choice.tok_per_s
    )
    assert share == pytest.approx(worse.correction) and share < 0.6


def test_smallest_of_equal_choices(known: Calibration) -> None:
    one_tree = Calibration(forest=known.forest[:1])
    free = PassCosts(compute=((1, 1.0), (1024, 1.0)), step=((1, 0.0), (64, 0.0)))
    rows = sweep(one_tree, free, (1024,), (4, 8, 16))
    speeds = np.array([row.choice.tok_per_s for row in rows])
    assert speeds.min() >= 0.99 * speeds.max() and best(rows).choice.width == 4


def test_shapes_cost_their_own_steps(known: Calibration) -> None:
    small, large = static_sweep(known, _FLAT, (16, 128), 8)
    shape = choose_tree_shape(known.acceptance(), _FLAT, 128, 8)
    assert large.choice.tokens_per_pass == shape.expected and large.nodes == len(shape)
    assert large.draft == pytest.approx(0.01 * len(shape.steps(8)))
    assert large.choice.tokens_per_pass > small.choice.tokens_per_pass
    (shared,) = static_sweep(known, _FLAT, [8 * 16], 8, 8)
    assert shared.choice.tokens_per_pass == pytest.approx(8 * small.choice.tokens_per_pass)
    assert shared.nodes == 8 * small.nodes and shared.draft == pytest.approx(small.draft)

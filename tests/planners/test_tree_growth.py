"""When a step pays, and how many nodes pay, for one tree and several; and replays that predict growth."""

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offspec.draft.grow.best_first import grow
from offspec.draft.grow.result import GrownTree
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.mix.mixture import Mixture
from offspec_planners.cost import PassCosts
from offspec_planners.shared_budget import best_width, share
from offspec_planners.tree_growth import GrowthOutcome, RecordedTree, best_size, pays, replay
from tests.support.table_drafter import TableDrafter, greedy_scorer, random_table

WORDS = 12
SECONDS = st.floats(0.0, 2.0)
COSTS = st.builds(
    lambda base, row, step, node, start, link, rest: PassCosts(
        compute=((1, base + row), (1001, base + 1001 * row)),
        step=((1, step), (65, step + 64 * node)),
        start=start,
        link=link,
        rest=rest * link,
    ),
    base=st.floats(0.01, 1.0),
    row=st.floats(0.0, 0.02),
    step=st.floats(0.001, 0.2),
    node=st.floats(0.0, 0.01),
    start=SECONDS,
    link=SECONDS,
    rest=st.floats(0.0, 1.0),
)


@given(st.lists(st.floats(-12.0, 0.0), max_size=60), SECONDS, COSTS)
def test_best_size_equals_a_plain_loop(found: list[float], draft: float, costs: PassCosts) -> None:
    scores = [0.0, *sorted(found, reverse=True)]
    rates, expected = [], 0.0
    for rows, score in enumerate(scores, 1):
        expected += np.exp(score)
        rates.append(expected / float(costs.iteration(draft, rows)))
    size = best_size(np.array(scores), draft, costs)
    assert rates[size - 1] == pytest.approx(max(rates), rel=1e-12)


def _grow(table: torch.Tensor, policy: GrowthPolicy, depth: int = 20) -> tuple[GrownTree, list[int]]:
    drafter = TableDrafter(table)
    growth = grow(Mixture.single(drafter, greedy_scorer(len(table))), [0, 2], policy, depth)
    growth.tree.check()
    return growth, [len(nodes) for nodes in drafter.steps]


def _same(growth: GrownTree, widths: list[int], replayed: GrowthOutcome) -> None:
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
def test_replay_equals_growth(
    seed: int, budget: int, width: int, min_gain: float, costs: PassCosts | None
) -> None:
    """The record holds every node that a smaller growth considers: all of a tree of few levels."""
    table, depth = random_table(seed, size=8), 3
    every = sum(len(table) ** level for level in range(depth + 1))
    whole, _ = _grow(table, GrowthPolicy(every, 64, min_gain=0.0), depth)
    assert len(whole.tree) == every
    record = RecordedTree(whole.tree.parent.astype(np.int32), whole.tree.score.astype(np.float32))
    growth, widths = _grow(table, GrowthPolicy(budget, width, min_gain, costs), depth)
    _same(growth, widths, replay((record,), budget, width, costs, min_gain, depth))


def test_recorded_tree_can_be_replayed() -> None:
    """The record is made by a growth of its size, and only the best of its nodes are verified.

    Unlikely nodes expanded only by the first steps are missing in it, so the growth may be a step behind its
    replay, by the draft. It is never ahead of it.
    """
    off, budget, width = [], 16, 8
    for seed in range(20):
        table = random_table(seed, size=WORDS)
        recording, _ = _grow(table, GrowthPolicy(budget, width, min_gain=0.0, record=300), depth=300)
        assert len(recording.tree) == budget and recording.recorded is not None
        assert len(recording.recorded.parent) == 300
        growth, _ = _grow(table, GrowthPolicy(budget, width), depth=300)
        replayed = replay((recording.recorded,), budget, width, None)
        assert recording.tree.expected_tokens >= growth.tree.expected_tokens * (1 - 1e-6)
        off.append(replayed.expected / growth.tree.expected_tokens - 1)
    assert min(off) > -1e-6
    assert np.quantile(off, 0.9) < 1e-6 and max(off) < 0.02


def test_certain_draft_grows_deep_trees() -> None:
    """Two tokens that follow each other almost surely: hopeless nodes next to them cost no steps."""
    growth, widths = _grow(random_table(300, size=WORDS), GrowthPolicy(16, 8))
    assert growth.tree.expected_tokens > 14 and growth.tree.depth.max() > 13
    assert sum(widths) < 40


def test_tree_limited_by_depth_is_not_recorded() -> None:
    table = random_table(0, 4.0, WORDS)
    growth, _ = _grow(table, GrowthPolicy(8, 4, min_gain=0.0, record=60), depth=2)
    assert growth.recorded is None


def test_damaged_trees_are_refused() -> None:
    good = RecordedTree(np.array([-1, 0, 1], np.int32), np.array([0, -0.5, -2.25], np.float32)).to_json()
    again = RecordedTree.from_json(good)
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
            RecordedTree.from_json({**good, key: value})


Scores = list[NDArray[np.float64]]
# Few values, so that trees tie.
TREES = st.lists(
    st.lists(st.sampled_from([-0.25, -0.5, -1.0, -3.0, -7.0]), max_size=12).map(
        lambda found: np.array([0.0, *sorted(found, reverse=True)])
    ),
    min_size=1,
    max_size=5,
)
LIMITS = st.none() | st.integers(1, 60)


def one_by_one(
    scores: Scores, draft: float, costs: PassCosts | None, most: int | None, floor: int
) -> list[tuple[list[int], float]]:
    """Numbers of nodes of each tree and tokens per second, from the minimum on, one more node each time."""
    most = sum(map(len, scores)) if most is None else most
    while floor > 1 and floor * len(scores) > most:
        floor -= 1
    counts = [min(floor, len(tree)) for tree in scores]
    heap = [
        (-tree[count], i)
        for i, (tree, count) in enumerate(zip(scores, counts, strict=True))
        if count < len(tree)
    ]
    heapq.heapify(heap)
    found = list[tuple[list[int], float]]()
    while True:
        tokens = sum(float(np.exp(tree[:count]).sum()) for tree, count in zip(scores, counts, strict=True))
        seconds = 1.0 if costs is None else float(costs.iteration(draft, sum(counts)))
        found.append(([*counts], tokens / seconds))
        if not heap or sum(counts) >= most:
            return found
        _, i = heapq.heappop(heap)
        counts[i] += 1
        if counts[i] < len(scores[i]):
            heapq.heappush(heap, (-scores[i][counts[i]], i))


@given(TREES, SECONDS, COSTS, LIMITS, st.integers(1, 4))
def test_nodes_are_assigned_to_the_most_likely_trees(
    scores: Scores, draft: float, costs: PassCosts, most: int | None, floor: int
) -> None:
    ways = one_by_one(scores, draft, costs, most, floor)
    sizes = share(scores, draft, costs, most, floor)
    rates = {tuple(counts): rate for counts, rate in ways}
    assert rates[tuple(sizes)] == pytest.approx(max(rates.values()), rel=1e-12)
    assert share(scores, draft, None, most, floor) == ways[-1][0], "without costs as many as there may be"
    assert share(scores[:1], draft, costs) == [best_size(scores[0], draft, costs)]


def test_every_tree_keeps_its_root_and_the_floor() -> None:
    sure, unsure = np.log([1.0, 0.9, 0.8, 0.7]), np.log([1.0, 0.01, 0.001])
    assert share([sure, unsure], 0.0, None, most=5) == [4, 1]
    assert share([sure, unsure], 0.0, None, most=5, floor=2) == [3, 2]
    assert share([sure, unsure, np.zeros(1)], 0.0, None, most=2, floor=2) == [1, 1, 1]
    dear = PassCosts(compute=((1, 1.0), (2, 2.0)), step=((1, 0.0),))
    assert share([sure, unsure], 0.0, dear) == [1, 1]
    assert share([sure, unsure], 0.0, dear, floor=3) == [4, 3]


def rates_by_width(
    scores: NDArray[np.float64], frontier: NDArray[np.float64], draft: float, costs: PassCosts
) -> list[float]:
    """The rate after steps of 0, 1, 2 and more nodes."""
    ordered = -np.sort(-scores)
    rows = best_size(ordered, draft, costs)
    tokens, rates = float(np.exp(ordered[:rows]).sum()), list[float]()
    for width in range(len(frontier) + 1):
        step = float(costs.step_seconds(width)) if width else 0.0
        more = float(np.exp(frontier[:width]).sum())
        rates.append((tokens + more) / float(costs.iteration(draft + step, rows)))
    return rates


@given(TREES, st.lists(st.floats(-6.0, 0.0), min_size=1, max_size=20), SECONDS, COSTS)
def test_growth_continues_while_a_step_raises_the_rate(
    trees: Scores, frontier: list[float], draft: float, costs: PassCosts
) -> None:
    scores, offered = np.concatenate(trees), np.array(sorted(frontier, reverse=True))
    now, *_, then = rates_by_width(scores, offered, draft, costs)
    if abs(now - then) > 1e-9 * now:
        assert pays(scores, offered, draft, costs, 0.01) == (then > now)


@given(TREES, st.lists(st.floats(-6.0, 0.0), min_size=1, max_size=20), SECONDS, COSTS)
def test_step_has_the_best_width(
    trees: Scores, frontier: list[float], draft: float, costs: PassCosts
) -> None:
    scores, offered = np.concatenate(trees), np.array(sorted(frontier, reverse=True))
    rates = rates_by_width(scores, offered, draft, costs)
    width = best_width(scores, offered, draft, costs, 0.01)
    assert rates[width] == pytest.approx(max(rates), rel=1e-12)
    if pays(scores, offered, draft, costs, 0.01) and max(rates[1:]) > rates[0] * (1 + 1e-9):
        assert width, "what one tree would do pays for several"
    for gain in (0.01, 0.5):  # without costs all or none
        taken = pays(scores, offered, 0.0, None, gain)
        assert best_width(scores, offered, 0.0, None, gain) == len(frontier) * taken

"""Rows of one pass among several trees, and the width of a step for all: as obvious loops have them."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offspec_planners.best_first import best_size, pays
from offspec_planners.cost import PassCosts
from offspec_planners.forest import best_width, share
from tests.planners.cost_draws import COSTS, SECONDS

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
    """Numbers of nodes of each tree and tokens per second, from the fewest on, a node more each time."""
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
def test_nodes_go_where_they_are_likeliest(
    scores: Scores, draft: float, costs: PassCosts, most: int | None, floor: int
) -> None:
    ways = one_by_one(scores, draft, costs, most, floor)
    sizes = share(scores, draft, costs, most, floor)
    rates = {tuple(counts): rate for counts, rate in ways}
    assert rates[tuple(sizes)] == pytest.approx(max(rates.values()), rel=1e-12)
    assert share(scores, draft, None, most, floor) == ways[-1][0], "without costs as many as there may be"


@given(TREES, SECONDS, COSTS)
def test_a_tree_by_itself_has_its_best_size(scores: Scores, draft: float, costs: PassCosts) -> None:
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
    rates = [float(np.exp(ordered[:rows]).sum()) / float(costs.iteration(draft, rows))]
    for width in range(1, len(frontier) + 1):
        tokens = float(np.exp(ordered[:rows]).sum() + np.exp(frontier[:width]).sum())
        rates.append(tokens / float(costs.iteration(draft + float(costs.step_seconds(width)), rows)))
    return rates


@given(TREES, st.lists(st.floats(-6.0, 0.0), min_size=1, max_size=20), SECONDS, COSTS)
def test_a_step_is_as_wide_as_pays_best(
    trees: Scores, frontier: list[float], draft: float, costs: PassCosts
) -> None:
    scores, offered = np.concatenate(trees), np.array(sorted(frontier, reverse=True))
    rates = rates_by_width(scores, offered, draft, costs)
    width = best_width(scores, offered, draft, costs, 0.01)
    assert rates[width] == pytest.approx(max(rates), rel=1e-12)
    if pays(scores, offered, draft, costs, 0.01) and max(rates[1:]) > rates[0] * (1 + 1e-9):
        assert width, "what one tree would do pays for several"


@given(TREES, st.lists(st.floats(-6.0, 0.0), min_size=1, max_size=20), st.floats(0.0, 1.0))
def test_without_costs_all_or_none(trees: Scores, frontier: list[float], gain: float) -> None:
    scores, offered = np.concatenate(trees), np.array(frontier)
    taken = pays(scores, offered, 0.0, None, gain)
    assert best_width(scores, offered, 0.0, None, gain) == len(frontier) * taken

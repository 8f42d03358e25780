"""Choosing a budget and a width by replaying trees, and by shapes."""

import numpy as np
import pytest

from offspec_planners.acceptance import Calibration, typical
from offspec_planners.cost import PassCosts
from offspec_planners.search import best, outlook, static_sweep, sweep
from offspec_planners.sequoia import choose_tree_shape

_FLAT = PassCosts(compute=((1, 1.0), (1024, 1.0)), step=((1, 0.01), (64, 0.01)))
_STEEP = PassCosts(compute=((1, 0.1), (1024, 102.4)), step=((1, 0.01), (64, 0.01)))


@pytest.fixture(scope="module")
def known() -> Calibration:
    return typical("substitute")


def test_free_nodes_make_large_trees_and_dear_ones_small(known: Calibration) -> None:
    budgets, widths = (1, 16, 64, 256), (4, 32)
    assert best(sweep(known, _FLAT, budgets, widths)).choice.budget == 256
    assert best(sweep(known, _STEEP, budgets, widths)).choice.budget == 1


def test_widths_are_no_larger_than_budgets(known: Calibration) -> None:
    rows = sweep(known, _FLAT, (1, 8, 16), (4, 16))
    assert [(row.choice.budget, row.choice.width) for row in rows] == [(1, 1), (8, 4), (16, 4), (16, 16)]


def test_a_pass_without_guesses_brings_one_token(known: Calibration) -> None:
    alone = outlook(known, _FLAT, 1, 1)
    assert (alone.choice.tokens_per_pass, alone.choice.seconds_per_pass, alone.draft) == (1.0, 1.0, 0.0)


def test_what_passes_brought_corrects_what_trees_promise(known: Calibration) -> None:
    worse = Calibration(forest=known.forest, expected=1000.0, observed=500.0)
    share = outlook(worse, _FLAT, 64, 8).choice.tok_per_s / outlook(known, _FLAT, 64, 8).choice.tok_per_s
    assert share == pytest.approx(worse.correction) and share < 0.6


def test_of_equals_the_smallest(known: Calibration) -> None:
    one_tree = Calibration(forest=known.forest[:1])
    free = PassCosts(compute=((1, 1.0), (1024, 1.0)), step=((1, 0.0), (64, 0.0)))
    rows = sweep(one_tree, free, (1024,), (4, 8, 16))
    speeds = np.array([row.choice.tok_per_s for row in rows])
    assert speeds.min() >= 0.99 * speeds.max() and best(rows).choice.width == 4


def test_shapes_are_priced_by_their_own_steps(known: Calibration) -> None:
    small, large = static_sweep(known, _FLAT, (16, 128), 8)
    shape = choose_tree_shape(known.acceptance(), _FLAT, 128, 8)
    assert large.choice.tokens_per_pass == shape.expected and large.nodes == len(shape)
    assert large.steps == len(shape.steps(8)) and large.draft == pytest.approx(0.01 * large.steps)
    assert large.choice.tokens_per_pass > small.choice.tokens_per_pass
    (shared,) = static_sweep(known, _FLAT, [8 * 16], 8, 8)
    assert shared.choice.tokens_per_pass == pytest.approx(8 * small.choice.tokens_per_pass)
    assert (shared.nodes, shared.steps) == (8 * small.nodes, small.steps)

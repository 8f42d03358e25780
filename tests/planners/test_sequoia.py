"""Static trees: both solvers compared with every possible tree, and the size with a plain search."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offspec_planners.cost import PassCosts
from offspec_planners.sequoia import Heap, TreeShape, best_tree_shape, choose_tree_shape
from offspec_planners.sequoia.dp import Programme

Table = NDArray[np.float64]
Tree = tuple["Tree", ...]  # the children, by rank


@cache
def _trees(nodes: int) -> tuple[Tree, ...]:
    """Every ordered tree of exactly this many nodes; a child's position among its siblings is its rank."""
    return tuple(_forests(nodes - 1))


def _forests(nodes: int) -> Iterator[Tree]:
    if nodes == 0:
        yield ()
    for first in range(1, nodes + 1):
        for tree in _trees(first):
            for others in _forests(nodes - first):
                yield (tree, *others)


def _value(tree: Tree, table: Table, depth: int = 0) -> float:
    """Expected tokens. Nodes below the last level or beyond the last rank count zero."""
    if depth == len(table):
        return 1.0
    below = zip(table[depth], tree, strict=False)
    return 1.0 + sum(float(share) * _value(child, table, depth + 1) for share, child in below)


def _expected_tokens(shape: TreeShape, table: Table) -> float:
    """Expected tokens of a shape, from its columns alone; checks that they make a static tree."""
    levels, worth, children = shape.levels(), [1.0], dict[int, int]()
    assert shape.parent[0] == -1 and (np.diff(shape.parent) >= 0).all() and (np.diff(levels) >= 0).all()
    for node in range(1, len(shape)):
        parent, rank = int(shape.parent[node]), int(shape.rank[node])
        assert parent < node and rank == children.get(parent, 0)
        children[parent] = rank + 1
        worth.append(worth[parent] * table[min(levels[parent], len(table) - 1), rank])
    assert shape.depth == levels.max()
    return sum(worth)


_share = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.5, 1.0]))


@st.composite
def tables(draw: st.DrawFn, falling: bool = False) -> Table:
    depths, ranks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    rows = draw(st.lists(st.lists(_share, min_size=ranks, max_size=ranks), min_size=depths, max_size=depths))
    table = np.array(rows)
    return -np.sort(-table, axis=1) if falling else table


@given(st.one_of(tables(), tables(falling=True)), st.integers(1, 9))
def test_tree_is_optimal(table: Table, nodes: int) -> None:
    depth = len(table)
    best = max(_value(tree, table) for tree in _trees(nodes))
    shape = best_tree_shape(table, nodes, depth)
    assert shape.expected == pytest.approx(best, abs=1e-9)
    assert _expected_tokens(shape, table) == pytest.approx(best, abs=1e-9)
    assert len(shape) <= nodes and shape.depth <= depth
    assert Programme(table, nodes).expected[-1] == pytest.approx(best, abs=1e-9)


@given(tables(falling=True), st.integers(1, 60))
def test_heap_and_dynamic_programme_agree_for_falling_ranks(table: Table, nodes: int) -> None:
    heap, programme = Heap(table, nodes), Programme(table, nodes)
    assert heap.expected == pytest.approx(programme.expected, abs=1e-9)
    inner = heap.inner()
    assert inner.shape == (len(table), nodes)
    for size in range(1, nodes + 1):
        parent, _ = heap.trace(size)
        assert inner[:, size - 1].sum() == len(set(parent[1:]))


def _plain(table: Table, nodes: int) -> Table:
    """The recurrence of the paper, with every convolution written out."""
    subtree = np.ones(nodes + 1)
    subtree[0] = 0
    for row in table[::-1]:
        rest = np.zeros(nodes + 1)
        for share in row[::-1]:
            sums = [(share * subtree[1 : n + 1] + rest[:n][::-1]).max(initial=0.0) for n in range(nodes + 1)]
            rest = np.array(sums)
        subtree = np.concatenate([[0.0], 1.0 + rest[:nodes]])
    return subtree


@settings(max_examples=24)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["rising", "random", "last", "noisy", "steps", "flat"]))
def test_bounds_exclude_no_optimum(seed: int, kind: str) -> None:
    """Sizes at which blocks and distant positions matter, with tables that a concave bound fits badly."""
    random = np.random.default_rng(seed)
    depths, ranks, nodes = (int(random.integers(low, high)) for low, high in ((1, 6), (1, 20), (60, 300)))
    table = random.dirichlet(np.ones(ranks), depths)
    if kind == "rising":
        table = np.sort(table, axis=1)
    elif kind == "last":
        table[:, :-1] = 0
    elif kind == "noisy":
        table = random.poisson(40 * 0.6 ** np.arange(ranks), (depths, ranks)) / 100
    elif kind == "steps":
        table = (random.random((depths, ranks)) < 0.2) * random.random((depths, 1))
    elif kind == "flat":
        table = np.full((depths, ranks), random.random()) * (1 + 1e-6 * random.random((depths, ranks)))
    table = np.minimum(table, 1.0)
    expected = Programme(table, nodes).expected
    assert expected == pytest.approx(_plain(table, nodes), rel=1e-10)
    assert _expected_tokens(best_tree_shape(table, nodes, depths), table) == pytest.approx(
        expected[-1], rel=1e-10
    )


def test_later_child_needs_the_earlier_ones() -> None:
    table = np.array([[0.1, 0.2, 0.6]])
    assert best_tree_shape(table, 2, 1).expected == pytest.approx(1.1)
    assert best_tree_shape(table, 4, 1).rank.tolist() == [0, 0, 1, 2]
    assert best_tree_shape(np.array([[0.5, 0.0, 0.0]]), 4, 1).rank.tolist() == [0, 0], (
        "what adds nothing is left out"
    )
    assert len(best_tree_shape(table, 50, 0)) == 1


def test_steps_cover_inner_nodes_by_level() -> None:
    shape = best_tree_shape(np.array([[0.5, 0.3, 0.2], [0.4, 0.4, 0.1]]), 60, 5)
    levels = shape.levels()
    for width in (1, 3, 100):
        steps = shape.steps(width)
        assert all(1 <= len(nodes) <= width and len(set(levels[nodes])) == 1 for nodes in steps)
        inner = [node for nodes in steps for node in nodes.tolist()]
        assert inner == sorted(set(shape.parent[1:].tolist()))
        assert [list(shape.children(node)) for node in inner] == [
            np.flatnonzero(shape.parent == node).tolist() for node in inner
        ]
    assert best_tree_shape([[0.5]], 1, 3).steps(4) == []


@settings(max_examples=40)
@given(tables(), st.integers(1, 40), st.integers(1, 9), st.floats(0, 0.5), st.floats(0, 3))
def test_size_and_depth_are_optimal(table: Table, budget: int, width: int, step: float, link: float) -> None:
    falling = -np.sort(-table, axis=1)
    costs = PassCosts(compute=((1, 0.5), (40, 1.5)), step=((1, step), (9, 2 * step)), start=0.05, link=link)

    def seconds(shape: TreeShape) -> float:
        draft = costs.draft_seconds([len(nodes) for nodes in shape.steps(width)])
        return float(costs.iteration(draft, len(shape))) / shape.expected

    best = min(
        seconds(best_tree_shape(falling, nodes, levels))
        for nodes in range(1, budget + 1)
        for levels in range(len(table) + 1)
    )
    chosen = choose_tree_shape(falling, costs, budget, width)
    assert len(chosen) <= budget
    assert seconds(chosen) == pytest.approx(best)
    rising = choose_tree_shape(table, costs, budget, width)  # its draft steps are an estimate
    assert _expected_tokens(rising, table) == pytest.approx(rising.expected) and len(rising) <= budget


def test_slow_draft_gets_a_flat_tree_and_slow_link_a_large_one() -> None:
    table = np.tile(0.5 ** np.arange(1, 17), (16, 1))
    compute = ((1, 0.1), (1024, 0.5))
    hasty = choose_tree_shape(table, PassCosts(compute, ((1, 1.0),)), 1024, 32)
    patient = choose_tree_shape(table, PassCosts(compute, ((1, 0.001), (32, 0.002)), link=20.0), 1024, 32)
    assert hasty.depth < 4 < patient.depth and len(patient) > 900 > len(hasty)


def test_invalid_tables_and_empty_trees_are_refused() -> None:
    wrong: tuple[object, ...] = ([], [0.5], [[1.5]], [[-0.1]], [[float("nan")]], [[]])
    for table in wrong:
        with pytest.raises(ValueError, match=r"not a \[depth, rank\] table"):
            best_tree_shape(table, 4, 2)
    with pytest.raises(ValueError, match="not 0 nodes and depth 2"):
        best_tree_shape([[0.5]], 0, 2)

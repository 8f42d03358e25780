"""Static trees: the shape with the most expected tokens, and the most profitable size.

If acceptance depends only on the rank of a draft token, one shape for all passes is as good as a tree grown
for each pass (Chen et al. 2024, Sequoia, arXiv 2402.12374).

Letters: D depths, K ranks, N nodes. acceptance [D, K] is the probability that the b-th child of a node at
depth d is accepted; below the last row, the last row applies.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offspec_planners.cost import PassCosts
from offspec_planners.sequoia.dp import Programme

Acceptance = NDArray[np.float64]

_ENOUGH = 0.995  # of the best time found: where no bound is lower, the search is over


class Heap:
    """Best trees of up to `nodes` nodes, with a level for each row of acceptance [D, K].

    expected [N + 1]: the best expected tokens of n nodes or fewer. Rows of acceptance must not rise. Then no
    node's path is less likely than the paths of its children and later siblings, so the N likeliest paths
    form a tree, equal to the result of popping them from a heap one by one. Going by levels allows
    vectorization
    with numpy: a node can be among the N best of D levels only if its parent is among the N best of the
    levels above.
    """

    def __init__(self, acceptance: NDArray[np.float64], nodes: int) -> None:
        self._acceptance, self._nodes = acceptance, nodes
        value, parent, rank = [np.ones(1)], [np.array([-1])], [np.array([0])]
        made, best = 1, np.ones(1)
        for row in acceptance:
            grown = value[-1][:, None] * row
            floor = best[-1] if len(best) == nodes else 0.0
            above, which = np.nonzero(grown > floor)
            if not len(above):
                break
            fresh = grown[above, which]
            # Here and below the older of equals wins, so no node is kept without its parent and older
            # siblings.
            kept = np.sort(np.argsort(-fresh, kind="stable")[:nodes])
            parent.append(made - len(value[-1]) + above[kept])
            rank.append(which[kept])
            value.append(fresh[kept])
            made += len(kept)
            best = -np.sort(-np.concatenate([best, fresh[kept]]))[:nodes]
        self._parent, self._rank = np.concatenate(parent), np.concatenate(rank)
        self._depth = np.repeat(np.arange(len(value)), [len(level) for level in value])
        values = np.concatenate(value)
        self._order = np.argsort(-values, kind="stable")[:nodes]
        reached = np.concatenate([[0.0], np.cumsum(values[self._order])])
        self.expected: NDArray[np.float64] = np.pad(reached, (0, nodes + 1 - len(reached)), mode="edge")

    def trace(self, nodes: int) -> tuple[list[int], list[int]]:
        """Return parent and rank of the best tree's nodes, level by level, without nodes that add nothing."""
        kept = np.sort(self._order[:nodes])
        place = np.full(len(self._parent) + 1, -1)  # the root's parent, -1, indexes the last
        place[kept] = np.arange(len(kept))
        return place[self._parent[kept]].tolist(), self._rank[kept].tolist()

    def inner(self) -> NDArray[np.int64]:
        """Return [D, N]: number of nodes with children per depth, in the best trees of 1 to N nodes."""
        # Each first child counts for its parent.
        first, depth = (self._rank == 0)[self._order], self._depth[self._order]
        levels = np.arange(1, len(self._acceptance) + 1)[:, None]
        counts = np.cumsum(first & (depth == levels), axis=1)
        return np.pad(counts, ((0, 0), (0, self._nodes - len(depth))), mode="edge")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Static tree, level by level, siblings together and in order of rank.

    Args:
        parent: [N] int32, -1 for the root, non-decreasing.
        rank: [N] int32, index of a node among its parent's children.
        expected: Expected tokens per pass, including the bonus token.
        depth: Levels below the root.
    """

    parent: NDArray[np.int32]
    rank: NDArray[np.int32]
    expected: float
    depth: int

    def __len__(self) -> int:
        return len(self.parent)

    def children(self, node: int) -> range:
        """Return the children of a node, best rank first."""
        start, stop = np.searchsorted(self.parent, (node, node + 1)).tolist()
        return range(start, stop)

    def levels(self) -> NDArray[np.int64]:
        """Return [N]: the depth of each node."""
        depth = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    def steps(self, width: int) -> list[NDArray[np.int64]]:
        """Return the nodes that have children, in groups of at most `width` nodes of one level."""
        inner = np.unique(self.parent[1:]).astype(np.int64)
        levels = self.levels()[inner]
        return [
            nodes[start : start + width]
            for depth in range(self.depth)
            for nodes in [inner[levels == depth]]
            for start in range(0, len(nodes), width)
        ]


def best_tree_shape(acceptance: ArrayLike, nodes: int, depth: int) -> TreeShape:
    """Return the shape with the most expected tokens (Chen et al. 2024, Sequoia, arXiv 2402.12374).

    Uses the heap if acceptance never rises with rank, else the dynamic programme. Nodes that add nothing are
    left out.

    Args:
        acceptance: [D, K], probability that the child of a rank is accepted at a node of a depth.
        nodes: Maximum number of nodes.
        depth: Maximum number of levels below the root.

    Raises:
        ValueError: acceptance is not a table of probabilities.
    """
    table = _checked(acceptance, nodes, depth)
    return _shape(_solved(table, nodes), nodes)


def choose_tree_shape(acceptance: ArrayLike, costs: PassCosts, budget: int, width: int) -> TreeShape:
    """Return the shape with the fewest seconds per expected token.

    If acceptance rises with rank, draft steps are counted on the tree that could take its children in any
    order, and no other size or depth is better by half a percent.

    Args:
        acceptance: [D, K], as in `best_tree_shape`; trees have at most D levels.
        costs: Costs of passes and steps.
        budget: Maximum number of nodes.
        width: Maximum number of a level's nodes expanded by a draft step.

    Raises:
        ValueError: acceptance is not a table of probabilities.
    """
    table = _checked(acceptance, budget, len(np.atleast_1d(acceptance)))
    deepest = _solved(table, budget).expected[1:]
    seconds, least = [], []
    for levels in range(len(table) + 1):
        # Children in any order, and more levels, can only be better: bounds that save most dynamic
        # programmes.
        relaxed = Heap(-np.sort(-table[:levels], axis=1), budget)
        seconds.append(_seconds(relaxed.inner(), costs, width))
        least.append(float((seconds[-1] / np.minimum(relaxed.expected[1:], deepest)).min()))
    best, shape = np.inf, None
    for levels in np.argsort(least, kind="stable"):
        if shape is not None and least[levels] >= _ENOUGH * best:
            break
        solved = _solved(table[:levels], budget)
        each = seconds[levels] / solved.expected[1:]
        if each.min() < best:
            best, shape = float(each.min()), _shape(solved, int(each.argmin()) + 1)
    assert shape is not None
    return shape


def _seconds(inner: NDArray[np.int64], costs: PassCosts, width: int) -> NDArray[np.float64]:
    """Return [N] seconds of a pass with the best tree of each size, whose inner [D, N] nodes are expanded."""
    whole, part = np.divmod(inner, width)
    steps = whole * costs.step_seconds(width) + np.where(part, costs.step_seconds(part), 0.0)
    draft = steps.sum(axis=0) + np.where(inner.any(axis=0), costs.start, 0.0)
    return costs.iteration(draft, np.arange(1, inner.shape[1] + 1))


def _checked(acceptance: ArrayLike, nodes: int, depth: int) -> Acceptance:
    """Check the table and return a row for each of `depth` levels."""
    table = np.asarray(acceptance, np.float64)
    if table.ndim != 2 or not table.size or not ((table >= 0) & (table <= 1)).all():
        raise ValueError(f"acceptance of shape {table.shape} is not a [depth, rank] table of probabilities")
    if nodes < 1 or depth < 0:
        raise ValueError(
            f"a tree needs at least one node and a depth of 0 or more, not {nodes} nodes and depth {depth}"
        )
    return table[np.minimum(np.arange(depth), len(table) - 1)]


def _solved(table: Acceptance, nodes: int) -> Heap | Programme:
    return Programme(table, nodes) if (np.diff(table, axis=1) > 0).any() else Heap(table, nodes)


def _shape(solved: Heap | Programme, nodes: int) -> TreeShape:
    parent, rank = solved.trace(nodes)
    shape = TreeShape(np.array(parent, np.int32), np.array(rank, np.int32), float(solved.expected[nodes]), 0)
    return replace(shape, depth=int(shape.levels()[-1]))

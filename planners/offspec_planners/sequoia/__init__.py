"""Static trees: the shape with the most expected tokens, and the size that pays best.

A drafter whose guesses are accepted by their rank, whatever they say, is served as well by one shape for all
passes as by a tree grown for each (Chen et al. 2024, Sequoia, arXiv 2402.12374).

Letters: D depths, K ranks, N nodes. acceptance [D, K] is the probability that the b-th child of a node at
depth d is the accepted one; below the last row it is taken to stay as it is there.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offspec_planners.cost import PassCosts
from offspec_planners.sequoia.dp import Programme

Acceptance = NDArray[np.float64]

_ENOUGH = 0.995  # of the best time found: where no bound is lower, the search is over


class Heap:
    """The best trees of up to `nodes` nodes, with a level for each row of acceptance [D, K].

    expected [N + 1]: the best expected tokens of n nodes or fewer. Rows of acceptance must not rise: then no
    node's path is less likely than that of a child or a later sibling, so the N likeliest paths are a tree,
    the same as a heap would pop one by one. Going by levels lets numpy do the work: a node can be among the N
    best of D levels only if its parent is among the N best of those above it.
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
            # Here and below the older of equals wins, so none is kept without its parent and older siblings.
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
        """parent and rank of the best tree's nodes, level by level, but for those that add nothing."""
        kept = np.sort(self._order[:nodes])
        place = np.full(len(self._parent) + 1, -1)  # the root's parent, -1, finds the last
        place[kept] = np.arange(len(kept))
        return place[self._parent[kept]].tolist(), self._rank[kept].tolist()

    def inner(self) -> NDArray[np.int64]:
        """[D, N]: how many nodes of each depth have children in the best trees of 1 to N nodes."""
        # Each first child stands for its parent.
        first, depth = (self._rank == 0)[self._order], self._depth[self._order]
        levels = np.arange(1, len(self._acceptance) + 1)[:, None]
        counts = np.cumsum(first & (depth == levels), axis=1)
        return np.pad(counts, ((0, 0), (0, self._nodes - len(depth))), mode="edge")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A static tree, level by level, siblings together and in order of rank.

    Args:
        parent: [N] int32, -1 for the root, never falling.
        rank: [N] int32, which of its parent's children a node is, 0 first.
        expected: Tokens of a pass, the bonus token included.
        depth: Levels below the root.
    """

    parent: NDArray[np.int32]
    rank: NDArray[np.int32]
    expected: float
    depth: int

    def __len__(self) -> int:
        return len(self.parent)

    def children(self, node: int) -> range:
        """The children of a node, best rank first."""
        start, stop = np.searchsorted(self.parent, (node, node + 1)).tolist()
        return range(start, stop)

    def levels(self) -> NDArray[np.int64]:
        """[N]: the depth of each node."""
        depth = np.zeros(len(self), np.int64)
        for node in range(1, len(self)):
            depth[node] = depth[self.parent[node]] + 1
        return depth

    def steps(self, width: int) -> list[NDArray[np.int64]]:
        """The nodes that have children, as they are expanded: by level, at most `width` of one together."""
        inner = np.unique(self.parent[1:]).astype(np.int64)
        levels = self.levels()[inner]
        return [
            nodes[start : start + width]
            for depth in range(self.depth)
            for nodes in [inner[levels == depth]]
            for start in range(0, len(nodes), width)
        ]


def best_tree_shape(acceptance: ArrayLike, nodes: int, depth: int) -> TreeShape:
    """The shape with the most expected tokens (Chen et al. 2024, Sequoia, arXiv 2402.12374).

    By the heap where acceptance rises with rank nowhere, else by the dynamic programme. Nodes that add
    nothing are left out.

    Args:
        acceptance: [D, K], probability that the child of a rank is accepted at a node of a depth.
        nodes: Most nodes.
        depth: Most levels below the root.

    Raises:
        ValueError: acceptance is not a table of probabilities.
    """
    table = _checked(acceptance, nodes, depth)
    return _shape(_solved(table, nodes), nodes)


def choose_tree_shape(acceptance: ArrayLike, costs: PassCosts, budget: int, width: int) -> TreeShape:
    """The shape with the fewest seconds per expected token.

    Where acceptance rises with rank, draft steps are counted on the tree that could take its children in any
    order, and no other size or depth is better by half a per cent.

    Args:
        acceptance: [D, K], as in `best_tree_shape`; levels go no deeper than D.
        costs: Of passes and steps.
        budget: Most nodes.
        width: Most nodes of a level expanded by a draft step.

    Raises:
        ValueError: acceptance is not a table of probabilities.
    """
    table = _checked(acceptance, budget, len(np.atleast_1d(acceptance)))
    deepest = _solved(table, budget).expected[1:]
    seconds, least = [], []
    for levels in range(len(table) + 1):
        # Children in any order can only be better, and so can more levels: bounds that spare most programmes.
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
    """[N]: of a pass with the best tree of each size, of which inner [D, N] nodes are expanded by depth."""
    whole, part = np.divmod(inner, width)
    steps = whole * costs.step_seconds(width) + np.where(part, costs.step_seconds(part), 0.0)
    draft = steps.sum(axis=0) + np.where(inner.any(axis=0), costs.start, 0.0)
    return costs.iteration(draft, np.arange(1, inner.shape[1] + 1))


def _checked(acceptance: ArrayLike, nodes: int, depth: int) -> Acceptance:
    """A row for each of `depth` levels."""
    table = np.asarray(acceptance, np.float64)
    if table.ndim != 2 or not table.size or not ((table >= 0) & (table <= 1)).all():
        raise ValueError(f"acceptance of shape {table.shape} is not a table [depth, rank] of probabilities")
    if nodes < 1 or depth < 0:
        raise ValueError(f"a tree has one node or more and no negative depth, not {nodes} and {depth}")
    return table[np.minimum(np.arange(depth), len(table) - 1)]


def _solved(table: Acceptance, nodes: int) -> Heap | Programme:
    return Programme(table, nodes) if (np.diff(table, axis=1) > 0).any() else Heap(table, nodes)


def _shape(solved: Heap | Programme, nodes: int) -> TreeShape:
    parent, rank = solved.trace(nodes)
    shape = TreeShape(np.array(parent, np.int32), np.array(rank, np.int32), float(solved.expected[nodes]), 0)
    return replace(shape, depth=int(shape.levels()[-1]))

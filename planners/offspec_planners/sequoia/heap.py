"""The best static tree where acceptance does not rise with rank: the likeliest paths, found level by level.

Then no node's path is less likely than that of a child or a later sibling, so the N likeliest paths are a
tree, the same as a heap would pop one by one. Going by levels lets numpy do the work: a node can be among the
N best of D levels only if its parent is among the N best of those above it.
"""

import numpy as np
from numpy.typing import NDArray


class Heap:
    """The best trees of up to `nodes` nodes, with a level for each row of acceptance [D, K].

    expected [N + 1]: the best expected tokens of n nodes or fewer. Rows of acceptance must not rise.
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

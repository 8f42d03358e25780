"""Sequoia's dynamic programme over static trees, exact for any acceptance, in numpy.

Letters: D levels below the root, at most K children per node, N nodes. acceptance[d, b] is the probability
that the target picks the b-th child of a node at depth d. In a static tree a child of rank b exists only if
the children of rank 0 to b - 1 do. Values are expected tokens, given that the walk has reached a node:

    subtree[d][n] = 1 + rest[d][0][n - 1]
    rest[d][b][n] = max over 1 <= y <= n of  acceptance[d, b] * subtree[d + 1][y] + rest[d][b + 1][n - y]

rest[d][b] is the gain from children of rank b and above with n nodes or fewer (Chen et al. 2024, Sequoia,
arXiv 2402.12374, which iterates over ranks from the first; iterating from the last gives the same result and
allows acceptance to depend on depth).

Each line is a (max, +) convolution: N² / 2 sums if done naively. Most are skipped. Each function has a
concave upper bound, and the sum of two bounds is concave in y: its peak is found by merging their slopes, and
once it has fallen below a value reached near the peak, nothing farther out can be better.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Values = NDArray[np.float64]
Places = NDArray[np.int64]

_REACH = 4  # places on either side of a peak that are tried first
_BLOCK = 64  # neighbouring n that share the search beyond
_ROUNDING = 1e-11  # tolerance of a bound for rounding


@dataclass(frozen=True, slots=True)
class _Bounded:
    """values [N], non-decreasing, and a concave function [N] that bounds them from above."""

    values: Values
    bound: Values


class Programme:
    """Filled tables for trees of at most `nodes` nodes, with a level for each row of acceptance [D, K].

    expected [N + 1]: best expected tokens of n nodes or fewer.
    """

    def __init__(self, acceptance: Values, nodes: int) -> None:
        self._acceptance = acceptance
        below = _Bounded(np.ones(nodes), np.ones(nodes))  # from one node on
        self._subtree, self._rest = [below.values], list[list[Values]]()
        for row in acceptance[::-1]:
            rest = _Bounded(np.zeros(nodes), np.zeros(nodes))  # from no node on
            tables = [rest.values]
            for share in row[::-1]:
                rest = _with_child(_Bounded(share * below.values, share * below.bound), rest)
                tables.append(rest.values)
            below = _Bounded(1.0 + rest.values, 1.0 + rest.bound)
            self._subtree.append(below.values)
            self._rest.append(tables[::-1])
        self._subtree.reverse()
        self._rest.reverse()
        self.expected: Values = np.concatenate([[0.0], self._subtree[0]])

    def trace(self, nodes: int) -> tuple[list[int], list[int]]:
        """Return parent and rank of a best tree's nodes, level by level, without nodes that add nothing."""
        parent, rank = [-1], [0]
        level = [(0, nodes)]  # nodes of one depth with the sizes of their subtrees
        for depth in range(len(self._acceptance)):
            above, level = level, []
            for node, size in above:
                for child, taken in self._children(depth, size - 1):
                    level.append((len(parent), taken))
                    parent.append(node)
                    rank.append(child)
        return parent, rank

    def _children(self, depth: int, nodes: int) -> Iterator[tuple[int, int]]:
        """Yield rank and subtree size of each child of a node at this depth with `nodes` nodes below it."""
        for rank, share in enumerate(self._acceptance[depth]):
            if nodes == 0 or self._rest[depth][rank][nodes] == 0.0:
                return
            others = self._rest[depth][rank + 1][:nodes]
            taken = int((share * self._subtree[depth + 1][:nodes] + others[::-1]).argmax()) + 1
            yield rank, taken
            nodes -= taken


def _with_child(child: _Bounded, rest: _Bounded) -> _Bounded:
    """Add one rank to the rest: `child` counts nodes from one, `rest` and the result from zero."""
    size = len(child.values)
    slopes = np.concatenate([np.diff(child.bound), np.diff(rest.bound)])
    steepest = np.argsort(-slopes, kind="stable")[: size - 1]  # merges two falling runs
    peak = np.concatenate([[0], np.cumsum(steepest < size - 1)])
    bound = child.bound[0] + np.concatenate([[0.0], np.cumsum(slopes[steepest])])
    values = _convolve(child, rest, peak)
    return _Bounded(np.concatenate([[0.0], values[:-1]]), _from_zero(bound[:-1]))


def _from_zero(bound: Values) -> Values:
    """Return the least concave bound [N + 1] of 0 for no node and a concave function [N] of more nodes."""
    count = np.arange(1, len(bound) + 1)
    mean = bound / count
    touch = int(mean.argmax()) if len(mean) else 0
    return np.concatenate([[0.0], mean[touch : touch + 1] * count[:touch], bound[touch:]])


def _convolve(child: _Bounded, rest: _Bounded, peak: Places) -> Values:
    """Return max over j <= m of child[j] + rest[m - j] for every m; the bounds' sum peaks at j = peak[m]."""
    total = np.arange(len(peak))
    near = np.clip(peak[:, None] + np.arange(-_REACH, _REACH + 1), 0, total[:, None])
    best: Values = (child.values[near] + rest.values[total[:, None] - near]).max(axis=1)
    undecided = np.zeros(len(peak), np.bool_)
    for beyond in (peak - _REACH - 1, peak + _REACH + 1):
        place = np.clip(beyond, 0, total)
        hopeful = child.bound[place] + rest.bound[total - place] > best + _ROUNDING
        undecided |= hopeful & (place == beyond)
    _look_farther(child, rest, np.unique(total[undecided] // _BLOCK), best)
    return best


def _look_farther(child: _Bounded, rest: _Bounded, blocks: Places, best: Values) -> None:
    """Raise best[m] to its exact value, for all m of these blocks, from every j that the bounds allow."""
    size = len(best)
    padded = np.concatenate([rest.values[::-1], np.full(size, -np.inf)])
    shifted = sliding_window_view(padded, size)[size - 1 :: -1]  # [m, j]: rest[m - j]
    sums = np.empty(_BLOCK * size)
    for start in blocks * _BLOCK:
        stop = min(start + _BLOCK, size)
        # Nothing falls with m: a j that cannot help the last m of a block, given the first's value, helps
        # none.
        bound = child.bound[:stop] + rest.bound[:stop][::-1]
        hopeful = np.flatnonzero(bound > best[start] + _ROUNDING)
        rows, columns = slice(start, stop), slice(hopeful[0], hopeful[-1] + 1)
        some = shifted[rows, columns]
        room = sums[: some.size].reshape(some.shape)  # allocating memory would cost more than the sums
        np.maximum(best[rows], np.add(some, child.values[columns], out=room).max(axis=1), out=best[rows])

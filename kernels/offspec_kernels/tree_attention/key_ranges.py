"""Choice of the keys a row attends to one by one and in blocks, by position alone.

A key may be part of the prefix, of a prompt chunk or of the tree, and a row's result must not depend on
which. So a row's last keys, which may be in the tree, are listed and attended one by one. Earlier keys are
cut at multiples of a fixed number of positions, and rows with equal cuts share the products. Only in a branch
longer than NEAR are some of the earlier keys in the tree; they are gathered for all rows that have them in
common.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.chunks import split_evenly
from offspec_kernels.dequant.native import Array
from offspec_kernels.tree_attention.native import list_keys
from offspec_kernels.tree_attention.sizes import AT_ONCE, BLOCK, FEW, NEAR, STEP
from offspec_kernels.tree_mask import TreeMask, Window, first_visible


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys at positions [low, high) for rows [start, stop); `keys`: their rows, unless equal to positions."""

    start: int
    stop: int
    low: int
    high: int
    keys: Tensor | None


@dataclass(frozen=True)
class QueryGroup:
    """Queries processed together, in order of position, and the cuts between their keys.

    Args:
        rows: [n] int64, indices of the queries.
        lists: [n, P] int32, key rows, padded to a multiple of AT_ONCE with the row's own.
        counts: [n] int32, number of valid keys in each list.
        words: [n, W] int64, see `TreeMask`.
        low, end: [n] int64, multiples of STEP: positions [low, end) are attended in blocks, others are
            listed.
        anchors: [n] int64, key row at the last position attended in blocks if it is in the tree, else -1.
        shared: Positions whose key row equals the position.
    """

    rows: Array
    lists: Array
    counts: Array
    words: Array
    low: Array
    end: Array
    anchors: Array
    shared: int

    @cached_property
    def key_ranges(self) -> list[KeyRange]:
        """Return the key ranges for a CPU, in order of position for every row."""
        return list(_pieces(self))


def query_groups(
    tree_mask: TreeMask, tree: int, window: Window | None, most: int, chosen: Tensor | None = None
) -> list[QueryGroup]:
    """Group a tree's queries by their keys, at most `most` per group. Synchronizes if only a GPU has the
    words.

    Position also decides which queries use the keys `chosen` [N, K].
    """
    reach = tree_mask.extents()[tree]
    words = tree_mask.words_of(tree)
    shared = reach.prefix + reach.causal  # positions whose key row equals the position
    behind = np.arange(reach.first, reach.first + reach.count)
    branch = np.unpackbits(words.view(np.uint8), axis=1).sum(axis=1, dtype=np.int64)
    ranks = np.where(behind < reach.causal, reach.prefix + behind, shared + branch - 1)
    bounds = _bounds(ranks, window)
    order = np.lexsort((behind, ranks))
    dense = len(order) if chosen is None else int((ranks < chosen.shape[1]).sum())
    cuts = [
        _cut(words, ranks, bounds, shared, order[part])
        for part in split_evenly(0, dense, most)
        if part.stop > part.start
    ]
    if chosen is not None:
        named = chosen[: reach.count].cpu().numpy().astype(np.int64)
        own = reach.prefix + behind
        cuts += [
            _chosen_cut(words, named, own, shared, order[part])
            for part in split_evenly(dense, reach.count, most)
            if part.stop > part.start
        ]
    return cuts


def _chosen_cut(words: Array, chosen: Array, own: Array, shared: int, rows: Array) -> QueryGroup:
    """Group queries that attend to the keys `chosen` [N, K] one by one; `own` [N] are their own key rows."""
    words, keys, own = (np.ascontiguousarray(of[rows]) for of in (words, np.sort(chosen, axis=1), own))
    bit = np.maximum(keys - shared, 0)
    known = np.take_along_axis(words, np.minimum(bit // 64, words.shape[1] - 1), axis=1) >> (bit % 64) & 1
    seen = np.where(keys < shared, keys <= own[:, None], known == 1)
    seen[:, 1:] &= keys[:, 1:] != keys[:, :-1]
    counts = seen.sum(axis=1, dtype=np.int32)
    lists = np.repeat(own[:, None], -(-keys.shape[1] // AT_ONCE) * AT_ONCE, axis=1).astype(np.int32)
    first = np.argsort(~seen, axis=1, kind="stable")
    met = np.arange(keys.shape[1]) < counts[:, None]
    lists[:, : keys.shape[1]][met] = np.take_along_axis(keys, first, axis=1)[met]
    none, nowhere = np.zeros(len(rows), np.int64), np.full(len(rows), -1)
    return QueryGroup(np.ascontiguousarray(rows), lists, counts, words, none, none, nowhere, shared)


def _bounds(ranks: Array, window: Window | None) -> Array:
    """Return [n, 3]: the first visible position of a row, and the positions [low, end) attended in blocks."""
    start = np.maximum(first_visible(window, ranks), 0) if window else np.zeros_like(ranks)
    low = -(-start // STEP) * STEP
    end = np.maximum((ranks + 1 - NEAR) // STEP * STEP, low)
    end = np.where(ranks + 1 - start <= FEW, low, end)
    return np.stack([start, low, end], axis=1)


def _cut(words: Array, ranks: Array, bounds: Array, shared: int, rows: Array) -> QueryGroup:
    words, ranks, bounds = (np.ascontiguousarray(of[rows]) for of in (words, ranks, bounds))
    longest = int((ranks + 1 - bounds[:, 0] - (bounds[:, 2] - bounds[:, 1])).max())
    lists = np.empty((len(rows), -(-longest // AT_ONCE) * AT_ONCE), np.int32)
    counts, anchors = np.empty(len(rows), np.int32), np.empty(len(rows), np.int64)
    list_keys(words, ranks, bounds, shared, lists, counts, anchors)
    if (anchors >= 0).any():  # make rows of one branch adjacent
        order = np.lexsort((anchors, bounds[:, 1], bounds[:, 2]))
        words, bounds, lists, counts, anchors = (
            np.ascontiguousarray(of[order]) for of in (words, bounds, lists, counts, anchors)
        )
        rows = rows[order]
    return QueryGroup(
        np.ascontiguousarray(rows), lists, counts, words, bounds[:, 1], bounds[:, 2], anchors, shared
    )


def _pieces(cut: QueryGroup) -> Iterator[KeyRange]:
    low, end, shared = cut.low, cut.end, cut.shared
    some = end > low
    if not some.any():
        return
    for block in range(int(low[some].min()) // BLOCK, -(-int(end.max()) // BLOCK)):
        first, last = np.maximum(low, block * BLOCK), np.minimum(end, (block + 1) * BLOCK)
        apart = np.where(last > shared, cut.anchors, -1)
        alike = np.stack([first, last, apart], axis=1)
        edges = np.flatnonzero((alike[1:] != alike[:-1]).any(axis=1)) + 1
        for start, stop in pairwise([0, *edges.tolist(), len(low)]):
            if first[start] < last[start]:
                keys = _keys_at(cut, start, int(first[start]), int(last[start]))
                yield KeyRange(start, stop, int(first[start]), int(last[start]), keys)


def _keys_at(cut: QueryGroup, row: int, low: int, high: int) -> Tensor | None:
    """Return key rows at positions [low, high) of a row's path; None if they equal the positions."""
    shared = cut.shared
    if high <= shared:
        return None
    path = branch_of(cut, row)
    return torch.from_numpy(
        np.concatenate([np.arange(low, shared), path[max(low - shared, 0) : high - shared]])
    )


def branch_of(cut: QueryGroup, row: int) -> Array:
    """Return the key rows of a row's path after the shared ones, in order of position."""
    bits = np.unpackbits(cut.words[row].view(np.uint8), bitorder="little")
    branch: Array = cut.shared + np.flatnonzero(bits)
    return branch

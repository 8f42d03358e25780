"""Rows of queries for a GPU's programs: tiles of one branch with their lists of keys."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.transfer import upload
from offspec_kernels.tree_attention.key_ranges import QueryGroup, branch_of
from offspec_kernels.tree_attention.sizes import PART


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries processed together, on the device.

    Args:
        rows: [n] int64, indices of the queries.
        lists: [n, P] int32, key rows attended one by one.
        counts: [n] int32, number of valid keys in each list.
        bounds: [n, 2] int32: positions [low, end) attended in blocks; zeros for none.
        tiles: [T, 3] int32: folded rows [begin, end), a query's G heads adjacent; and the branch.
        branches: [A, W] int32: key rows at positions from `shared` on.
        shared: Positions whose key row equals the position.
        first: First part in which a row has keys.
        parts: Number of parts up to the last one with keys.
    """

    rows: Tensor
    lists: Tensor
    counts: Tensor
    bounds: Tensor
    tiles: Tensor
    branches: Tensor
    shared: int
    first: int
    parts: int


def tiles_of(cut: QueryGroup, groups: int, size: int, device: torch.device) -> Tiles:
    """Split `cut` for G = `groups` heads per key head into tiles of at most `size` folded rows."""
    some = cut.end > cut.low
    first = int(cut.low[some].min()) // PART if some.any() else 0
    last = -(-int(cut.end[some].max()) // PART) if some.any() else 0
    tiles, branches = [], [np.empty(0, np.int64)]
    edges = np.flatnonzero(np.diff(cut.anchors)) + 1
    for start, stop in pairwise([0, *edges.tolist(), len(some)]):
        if cut.anchors[start] >= 0:
            branches.append(branch_of(cut, start)[: cut.end[start] - cut.shared])
        for begin in range(start * groups, stop * groups, size):
            end = min(begin + size, stop * groups)
            if some[begin // groups : -(-end // groups)].any():
                tiles.append((begin, end, len(branches) - 1))
    table = np.zeros((len(branches), max(map(len, branches))), np.int32)
    for row, branch in zip(table, branches, strict=True):
        row[: len(branch)] = branch
    bounds = (np.stack([cut.low, cut.end], axis=1) * some[:, None]).astype(np.int32)
    folded = np.array(tiles, np.int32).reshape(-1, 3)
    given = [cut.rows, cut.lists, cut.counts, bounds, folded, table]
    rows, lists, counts, bounds_, tiles_, branches_ = upload(given, device)
    return Tiles(rows, lists, counts, bounds_, tiles_, branches_, cut.shared, first, last - first)

"""Attention to keys shared by many rows on CPUs with bfloat16 products: an online softmax, tile by tile.

A thread takes some rows of a head through all their keys, one tile at a time: float32 scores from oneDNN's
small product, weights relative to the largest score so far, and the weighted values. All of these stay in the
core's cache (flash attention: Dao et al. 2022, arXiv 2205.14135). Tiles are cut by position, so a row
processes the same tiles in the same order whatever the other rows are.

Letters: KV key heads, R folded rows of a key head, each a query of a head; S keys, D and E elements of a key
and a value.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import carray, claim, compile_job, inlined, pointer
from offspec_kernels.dequant.threads import run_parallel
from offspec_kernels.quantized_rows import Rows, values_of
from offspec_kernels.row_linear.brgemm import call_product, call_release, find_brgemm
from offspec_kernels.tree_attention.blocks import SoftmaxState
from offspec_kernels.tree_attention.key_ranges import KeyRange
from offspec_kernels.tree_attention.native import copy, exp2, narrow_sum, scale, shrink, weigh_narrow
from offspec_kernels.tree_attention.sizes import BLOCK, LEAST_ROWS, TILE_KEYS, TILE_ROWS, thread_bytes

_PACKED, _TAKEN = 15, 21  # sizes of the loops' arguments: counters, addresses and sizes


def accumulate(
    query: Tensor,
    key: Rows,
    value: Rows,
    pieces: Sequence[KeyRange],
    groups: int,
    factor: float,
    sums: SoftmaxState,
) -> None:
    """Accumulate keys into `sums`.

    Args:
        query: [KV, R + LEAST_ROWS, D] bfloat16, contiguous, with G = `groups` heads per key head.
        key, value: [KV, S, D] and [KV, S, E].
        pieces: Key ranges in order of position for every row.
        factor: Factor of the scores, which puts them in powers of two.
        sums: [KV, R].
    """
    for _, some in groupby(pieces, _together):
        of = list(some)
        base, laid = _laid_out(of, key, value)
        _take(query, laid, list(_tiles(of, groups, base)), factor, sums)
        del laid  # free it before the next allocation


def _together(piece: KeyRange) -> object:
    """Return a key equal for consecutive pieces whose keys are laid out together."""
    return piece.low // BLOCK if piece.keys is None else -1 - id(piece)


def _laid_out(pieces: list[KeyRange], key: Rows, value: Rows) -> tuple[int, tuple[Tensor, Tensor]]:
    """Return the position of the first tile, and the tiles of all keys of these pieces."""
    low, high = min(piece.low for piece in pieces), max(piece.high for piece in pieces)
    where = slice(low, high) if pieces[0].keys is None else pieces[0].keys
    found = [values_of(rows[:, where]) for rows in (key, value)]
    keys, values = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in found)
    return low // TILE_KEYS * TILE_KEYS, _packed(keys, values, low % TILE_KEYS)


def _tiles(pieces: list[KeyRange], groups: int, base: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield folded rows [first, first + count) with their keys [low, high), counted from `base`."""
    for piece in pieces:
        for first in range(piece.start * groups, piece.stop * groups, TILE_ROWS):
            yield first, min(piece.stop * groups - first, TILE_ROWS), piece.low - base, piece.high - base


def _packed(keys: Tensor, values: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Lay out keys and values in tiles of T = TILE_KEYS, as a product's second factor, starting at `offset`.

    [KV, n, D / 2, T, 2] and [KV, n, T / 2, E, 2], flat after n.
    """
    (heads, count, size), width = keys.shape, values.shape[2]
    tiles = -(-(offset + count) // TILE_KEYS)
    laid = [torch.empty(heads * tiles * TILE_KEYS * of, dtype=torch.bfloat16) for of in (size, width)]
    job = np.array((
        0, heads, count, offset, tiles, size, width,
        *(number for of in (keys, values) for number in (of.data_ptr(), 2 * of.stride(0), 2 * of.stride(1))),
        *(of.data_ptr() for of in laid),
    ))  # fmt: skip
    assert len(job) == _PACKED
    run_parallel(compile_job(_pack), job, (keys, values, *laid), keys.numel() + values.numel())
    return laid[0].view(heads, tiles, -1), laid[1].view(heads, tiles, -1)


def _take(
    query: Tensor, laid: tuple[Tensor, Tensor], tiles: list[tuple[int, int, int, int]], factor: float,
    sums: SoftmaxState,
) -> None:  # fmt: skip
    found = find_brgemm()
    assert found is not None, "ask works first"
    heads, rows, width = sums.acc.shape
    which, scaling = np.array(tiles, np.int64), np.array([factor], np.float32)
    own = thread_bytes(width)
    memory = torch.empty(torch.get_num_threads() * own, dtype=torch.uint8)
    tensors = (query, *laid, sums.acc, sums.running_max, sums.running_sum, memory)
    job = np.array((
        0, 0, *found, heads, rows, query.shape[1], query.shape[2], width, laid[0].shape[1], len(which), own,
        *(of.data_ptr() for of in tensors), which.ctypes.data, scaling.ctypes.data,
    ))  # fmt: skip
    assert len(job) == _TAKEN
    pairs = heads * int((which[:, 1] * (which[:, 3] - which[:, 2])).sum())
    run_parallel(
        compile_job(_take_tiles), job, (*tensors, which, scaling), pairs * query.shape[2] // LEAST_ROWS
    )


@cache
def is_supported() -> bool:
    """Return whether the CPU has the product and a row's bits do not depend on other rows."""
    if find_brgemm() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, rows, 64, generator=generator, dtype=torch.float32).bfloat16()
        for rows in (80, 576, 576)
    )
    query[:, -LEAST_ROWS:] = 0

    def made(start: int, stop: int) -> Tensor:
        sums = SoftmaxState(
            *(torch.zeros(1, stop - start, *size, dtype=torch.float32) for size in ((64,), (), ()))
        )
        rows = query[:, start : stop + LEAST_ROWS].contiguous()
        accumulate(rows, key, value, [KeyRange(0, stop - start, 64, 576, None)], 1, 0.2, sums)
        return sums.acc.div_(sums.running_sum[:, :, None])

    many = made(0, 64)
    scores = 0.2 * query[0, :64].float() @ key[0, 64:].float().T
    weights = torch.exp2(scores - scores.amax(dim=1).clamp_min(0)[:, None])
    wanted = weights @ value[0, 64:].float() / weights.sum(dim=1)[:, None]
    if not torch.allclose(many[0], wanted, atol=0.02):
        return False
    return all(torch.equal(made(a, b), many[:, a:b]) for a, b in ((0, 1), (1, 4), (3, 20), (31, 64)))


def _pack(job: Any) -> None:
    """Pack tiles, which threads claim one by one."""
    words = carray(job, _PACKED, np.int64)
    heads, count, offset, tiles, size, width = words[1:7]
    key, key_head, key_row, value, value_head, value_row, keys, values = words[7:]
    while True:
        item = claim(words.ctypes.data)
        if item >= heads * tiles:
            break
        head, first = item // tiles, item % tiles * TILE_KEYS
        low, high = max(first, offset), min(first + TILE_KEYS, offset + count)
        made = carray(pointer(keys + item * TILE_KEYS * size * 2), size // 2 * TILE_KEYS, np.int32)
        at = key + head * key_head - offset * key_row
        for place in range(low, high, 16):  # one cache line of the output
            for some in range(place, min(place + 16, high)):
                row = carray(pointer(at + some * key_row), size // 2, np.int32)
                for d in range(size // 2):
                    made[d * TILE_KEYS + some - first] = row[d]
        at = value + head * value_head - offset * value_row
        for some in range(low, high, 2):
            one = carray(pointer(at + some * value_row), width, np.uint16)
            two = carray(pointer(at + (some + 1) * value_row), width, np.uint16)
            pairs = carray(
                pointer(values + (item * TILE_KEYS + some - first) * width * 2), 2 * width, np.uint16
            )
            for e in range(np.uint64(width)):
                pairs[2 * e], pairs[2 * e + np.uint64(1)] = one[e], two[e]


@inlined
def _weigh(
    scores: Any, some: int, factor: Any, tops: Any, totals: Any, weights: Any, sums: Any, width: int
) -> None:
    """Turn the first `some` scores of each row of a tile into weights, and rescale the sums to match."""
    for row in range(len(tops)):
        place = row * TILE_KEYS
        near, made = scores[place : place + some], weights[place : place + some]
        highest = max(tops[row], scale(near, factor))
        if highest > tops[row]:
            less = exp2(tops[row] - highest)
            shrink(sums[row * width : (row + 1) * width], less)
            totals[row] *= less
            tops[row] = highest
        weigh_narrow(near, tops[row], made)
        totals[row] += narrow_sum(made)


def _take_tiles(job: Any) -> None:
    """Process rows of a head, which threads claim in groups, through all their keys."""
    words = carray(job, _TAKEN, np.int64)
    product, release, heads, rows, stride, size, width, tiles, items, size_of_own = words[2:12]
    query, keys, values, acc, top, total, memory, which, scaling = words[12:]
    every, factor = carray(pointer(which), 4 * items, np.int64), carray(pointer(scaling), 1, np.float32)[0]
    own = memory + claim(words[1:].ctypes.data) * size_of_own
    scores = carray(pointer(own), TILE_ROWS * TILE_KEYS, np.float32)
    weights = carray(pointer(own + 4 * TILE_ROWS * TILE_KEYS), TILE_ROWS * TILE_KEYS, np.uint16)
    sums = carray(pointer(own + 6 * TILE_ROWS * TILE_KEYS), TILE_ROWS * width, np.float32)
    while True:
        item = claim(words.ctypes.data)
        if item >= heads * items:
            break
        head, place = item // items, item % items * 4
        first, count, low, high = every[place], every[place + 1], every[place + 2], every[place + 3]
        at, padded = head * rows + first, (count + 15) // 16 * 16
        asked = query + (head * stride + first) * size * 2
        kept = carray(pointer(acc + at * width * 4), count * width, np.float32)
        tops = carray(pointer(top + at * 4), count, np.float32)
        totals = carray(pointer(total + at * 4), count, np.float32)
        copy(kept, sums)
        while low < high:
            begin, tile = low % TILE_KEYS, (head * tiles + low // TILE_KEYS) * TILE_KEYS
            some = min(TILE_KEYS - begin, high - low)
            call_product(product, (
                padded, some, size, size, TILE_KEYS, TILE_KEYS, 0, asked,
                keys + (tile * size + begin * 2) * 2, scores.ctypes.data, 1,
            ))  # fmt: skip
            _weigh(scores, some, factor, tops, totals, weights, sums, width)
            call_product(product, (
                padded, width, some, TILE_KEYS, width, width, 1, weights.ctypes.data,
                values + (tile + begin) * width * 2, sums.ctypes.data, 1,
            ))  # fmt: skip
            low += some
        copy(sums[: count * width], kept)
    call_release(release, (1,))

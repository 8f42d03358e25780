"""Compiled AWQ loop for the CPU."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.avx512 import fetch_ahead, scaled_row
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.format import RowDequantizer, Shape
from offspec_kernels.dequant.native import WIDE, array, carray, compile_fill, compiled, inlined, widen
from offspec_kernels.dequant.scaled.native import (
    ANY_HALF,
    BLOCK,
    NONE,
    rounding_of,
    scaled_columns,
)
from offspec_kernels.dequant.threads import parallel_for


@inlined
def _spread_nibbles(four: Any) -> Any:
    """Spread 16 bits to 64: each 4 bits to the low half of every other byte."""
    two = (four | (four << np.uint64(24))) & np.uint64(0x000000FF000000FF)
    return (two | (two << np.uint64(12))) & np.uint64(0x000F000F000F000F)


@inlined
def _unpack(words: Any, codes: Any) -> None:
    """Unpack words into codes: uint64, eight bytes per word, even outputs in the low half, odd above."""
    for j in range(len(words)):
        word = np.uint64(np.uint32(words[j]))
        even, odd = _spread_nibbles(word & np.uint64(0xFFFF)), _spread_nibbles(word >> np.uint64(16))
        codes[j] = even | (odd << np.uint64(8))


_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each output in its word; the reference has a separate list
_AHEAD = 16  # prefetch distance in stored rows, from the row being decoded


_halves_row, _plain_row = (scaled_row(4, _PLACES, halves=halves) for halves in (True, False))


@inlined
def _scale_row(halves: bool, words: Any, shift: int, zero: Any, scale: Any, out: Any) -> None:
    """Scale a row through module-level names, since numba's cache key includes closure variables."""
    one, two, three, four = words.ctypes.data, zero.ctypes.data, scale.ctypes.data, out.ctypes.data
    if halves:
        _halves_row(one, shift, two, three, four)
    else:
        _plain_row(one, shift, two, three, four)


@compiled
def _unpack_all(words: Any, codes: Any) -> None:
    _unpack(words, codes)


@compiled
def _fill(
    words: Any, zeros: Any, scales: Any, group: int, columns: int, kind: int, out: Any, start: int, end: int
) -> None:
    """Fill blocks of columns [start, end), numbered across the blocks of all groups."""
    packed = np.empty(BLOCK // 8, np.uint64)
    codes = packed.view(np.uint8)
    blocks = (columns + BLOCK - 1) // BLOCK
    for block in range(start, end):
        first = block % blocks * BLOCK
        size = min(BLOCK, columns - first)
        place = block // blocks * columns + first
        zero, scale = zeros[place : place + size], scales[place : place + size]
        for row in range(block // blocks * group, (block // blocks + 1) * group):
            place = row * columns + first
            _unpack(words[place // 8 : (place + size) // 8], packed)
            scaled_columns(codes, zero, scale, kind, out[place : place + size])


def fill(format: Awq, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [in, out]."""
    (rows, columns), group = out.shape, format.group
    scales = parts["scales"].float()
    zeros = torch.empty(rows // group * columns, dtype=torch.uint8)
    _unpack_all(array(parts["qzeros"]), array(zeros.view(torch.uint64)))
    kind = rounding_of(scales, parts["scales"].dtype, 15, out.dtype)
    words, zero, scale, values = (array(each) for each in (parts["qweight"], zeros, scales, out))
    blocks = rows // group * -(-columns // BLOCK)
    parallel_for(
        lambda start, end: _fill(words, zero, scale, group, columns, kind, values, start, end),
        blocks,
        out.numel(),
    )


def row_dequantizer(
    format: Awq, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
) -> RowDequantizer:
    words, zeros, scales = (array(parts[name]) for name in ("qweight", "qzeros", "scales"))
    return RowDequantizer(_filling(parts["scales"].dtype), (words, zeros, scales), format.group)


@cache
def _filling(dtype: torch.dtype) -> int:
    halves = dtype == torch.float16
    stored = np.float32 if dtype == torch.float32 else np.uint16
    kind = ANY_HALF if halves else NONE

    def fill(
        words: Any, zeros: Any, scales: Any, group: int, columns: int, row: int, place: int, count: int,
        out: Any,
    ) -> None:  # fmt: skip
        size, codes, eight = min(WIDE, columns - place), np.empty(8, np.uint64), np.empty(8, np.uint64)
        zero, scale = eight.view(np.uint8), np.empty(WIDE, np.float32)
        values, done = carray(out, count * WIDE, np.uint16), 0
        while done < count:
            of = (row + done) // group
            end, first = min(count, (of + 1) * group - row), of * columns + place
            _unpack(carray(zeros, (first + size) // 8, np.int32)[first // 8 :], eight)
            widen(carray(scales, first + size, stored)[first:], halves, scale[:size])
            for k in range(done, end):
                at = ((row + k) * columns + place) // 8
                some, made = carray(words, at + size // 8, np.int32)[at:], values[k * WIDE : k * WIDE + size]
                if size == WIDE:
                    fetch_ahead(some.ctypes.data + _AHEAD * columns // 2, 1)
                    _scale_row(halves, some, 0, zero, scale, made)
                else:
                    _unpack(some, codes)
                    scaled_columns(codes.view(np.uint8), zero, scale, kind, made)
            done = end

    return compile_fill(fill)

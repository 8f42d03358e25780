"""Compiled GPTQ loop for the CPU."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.avx512 import fetch_ahead, scaled_row
from offspec_kernels.dequant.format import RowDequantizer, Shape
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.native import WIDE, array, carray, compile_fill, compiled, inlined, widen
from offspec_kernels.dequant.scaled.native import (
    ANY_HALF,
    BLOCK,
    NONE,
    rounding_of,
    scaled_columns,
    unpack_across,
    unpack_stream,
    unpacked,
)
from offspec_kernels.dequant.threads import parallel_for

_AHEAD = 2  # prefetch distance in rows of words, from the row being unpacked
_ROWS = 32  # rows whose codes fill whole words for any number of bits


@compiled
def _fill(
    words: Any, zeros: Any, scales: Any, index: Any, bits: int, columns: int, kind: int, out: Any, start: int,
    end: int,
) -> None:  # fmt: skip
    """Fill blocks of columns [start, end), numbered across all `_ROWS`-row blocks."""
    codes = np.empty(BLOCK, np.uint8)
    blocks = (columns + BLOCK - 1) // BLOCK
    for block in range(start, end):
        first = block % blocks * BLOCK
        size = min(BLOCK, columns - first)
        for row in range(block // blocks * _ROWS, min((block // blocks + 1) * _ROWS, len(index))):
            bit = row * bits
            place = (bit >> 5) * columns + first
            later = words[place + columns : place + columns + size]  # empty after the last word
            unpack_across(words[place : place + size], later, bits, bit & 31, codes)
            place = index[row] * columns + first
            zero, scale = zeros[place : place + size], scales[place : place + size]
            place = row * columns + first
            scaled_columns(codes, zero, scale, kind, out[place : place + size])


def fill(format: Gptq, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [in, out]."""
    format.check_values(parts)
    rows, columns = out.shape
    bits, scales = format.bits, parts["scales"].float()
    zeros = torch.empty(scales.numel(), dtype=torch.uint8)
    unpacked(array(format.zero_words(parts["qzeros"])), bits, format.later_plus_one, array(zeros))
    kind = rounding_of(scales, format.scales, (1 << bits) - 1, out.dtype)
    words, zero, scale, values = (array(each) for each in (parts["qweight"], zeros, scales, out))
    index = array(format.index(parts, rows))
    blocks = -(-rows // _ROWS) * -(-columns // BLOCK)
    parallel_for(
        lambda start, end: _fill(words, zero, scale, index, bits, columns, kind, values, start, end),
        blocks,
        out.numel(),
    )


def row_dequantizer(
    format: Gptq, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
) -> RowDequantizer:
    words, scales = (array(parts[name]) for name in ("qweight", "scales"))
    zeros, group = array(format.zero_words(parts["qzeros"])), format.group_of(shape[1])
    return RowDequantizer(_filling(format.bits, format.scales), (words, zeros, scales), group)


_halves2, _halves4, _halves8 = (scaled_row(bits, (0,), halves=True) for bits in (2, 4, 8))
_plain2, _plain4, _plain8 = (scaled_row(bits, (0,), halves=False) for bits in (2, 4, 8))


@inlined
def _scale_row(bits: int, halves: bool, words: Any, shift: int, zero: Any, scale: Any, out: Any) -> None:
    """Scale a row through module-level names, since numba's cache key includes closure variables.

    There is one for each number of bits: with the mask as an argument, 64 rows take 1/40 longer.
    """
    one, two, three, four = words.ctypes.data, zero.ctypes.data, scale.ctypes.data, out.ctypes.data
    if halves:
        if bits == 2:
            _halves2(one, shift, two, three, four)
        elif bits == 4:
            _halves4(one, shift, two, three, four)
        else:
            _halves8(one, shift, two, three, four)
    elif bits == 2:
        _plain2(one, shift, two, three, four)
    elif bits == 4:
        _plain4(one, shift, two, three, four)
    else:
        _plain8(one, shift, two, three, four)


@cache
def _filling(bits: int, dtype: torch.dtype) -> int:
    each, halves = 32 // bits, dtype == torch.float16
    stored = np.float32 if dtype == torch.float32 else np.uint16
    kind = ANY_HALF if halves else NONE

    def fill(
        words: Any, zeros: Any, scales: Any, group: int, columns: int, row: int, place: int, count: int,
        out: Any,
    ) -> None:  # fmt: skip
        size, codes, zero = min(WIDE, columns - place), np.empty(WIDE, np.uint8), np.empty(WIDE, np.uint8)
        scale, values, done = np.empty(WIDE, np.float32), carray(out, count * WIDE, np.uint16), 0
        while done < count:
            of = (row + done) // group
            end, first = min(count, (of + 1) * group - row), of * columns + place
            # Every 64 columns, and the remaining ones, fill whole words.
            unpack_stream(carray(zeros, (first + size) // each, np.int32)[first // each :], bits, zero[:size])
            widen(carray(scales, first + size, stored)[first:], halves, scale[:size])
            for k in range(done, end):
                at = (row + k) // each * columns + place
                some, made = carray(words, at + size, np.int32)[at:], values[k * WIDE : k * WIDE + size]
                shift = (row + k) % each * bits
                if shift == 0:
                    fetch_ahead(some.ctypes.data + 4 * _AHEAD * columns, 4 * size)
                if size == WIDE:
                    _scale_row(bits, halves, some, shift, zero, scale, made)
                else:
                    unpack_across(some, some, bits, shift, codes)
                    scaled_columns(codes, zero, scale, kind, made)
            done = end

    return compile_fill(fill)

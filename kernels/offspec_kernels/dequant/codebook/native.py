"""Compiled codebook loop for the CPU.

A block contains at most 16 different values, which are computed first, for many blocks at once. The value of
each code is then selected in four steps, by one bit of the code each: a CPU does this for a whole register of
codes, whereas it reads a table one value at a time.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.avx512 import (
    AHEAD,
    fetch_ahead,
    halves_high_first,
    look_up_high_first,
)
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.format import RowDequantizer, Shape
from offspec_kernels.dequant.native import (
    array,
    carray,
    compile_fill,
    compiled,
    inlined,
    put,
)
from offspec_kernels.dequant.scaled.native import rounded, rounding
from offspec_kernels.dequant.threads import parallel_for

_MANY = 64  # blocks whose values are computed at once


@inlined
def _scale(sizes: Any, table: Any, kind: int, values: Any) -> None:
    """Compute values [16, _MANY], flat, of each block; loops of compile-time length are fast."""
    for code in range(16):
        entry = table[code]
        row = values[code * _MANY : code * _MANY + _MANY]
        for block in range(_MANY):
            put(row, block, rounded(entry * sizes[block], kind))


@inlined
def _pick(code: Any, v: Any) -> Any:
    """Return v[code], v a tuple of 16."""
    bit = np.uint8(code & np.uint8(1)) != np.uint8(0)
    a, b = v[1] if bit else v[0], v[3] if bit else v[2]
    c, d = v[5] if bit else v[4], v[7] if bit else v[6]
    e, f = v[9] if bit else v[8], v[11] if bit else v[10]
    g, h = v[13] if bit else v[12], v[15] if bit else v[14]
    bit = np.uint8(code & np.uint8(2)) != np.uint8(0)
    a, c, e, g = b if bit else a, d if bit else c, f if bit else e, h if bit else g
    bit = np.uint8(code & np.uint8(4)) != np.uint8(0)
    a, e = c if bit else a, g if bit else e
    return e if np.uint8(code & np.uint8(8)) != np.uint8(0) else a


@inlined
def _put_pair(values: Any, byte: int, code: Any, v: Any) -> None:
    values[2 * byte] = _pick(np.uint8(code >> np.uint8(4)), v)
    values[2 * byte + 1] = _pick(np.uint8(code & np.uint8(15)), v)


@compiled
def _fill(
    codes: Any, absmax: Any, table: Any, bytes_: int, kind: int, out: Any, start: int, end: int
) -> None:
    """Fill blocks [start, end), of `bytes_` bytes each, a multiple of 16."""
    sizes, values = np.zeros(_MANY, np.float32), np.empty(16 * _MANY, out.dtype)
    for first in range(start, end, _MANY):
        last = min(first + _MANY, end)
        sizes[: last - first] = absmax[first:last]
        _scale(sizes, table, kind, values)
        for block in range(first, last):
            e = values[block - first :: _MANY]
            v = (
                *(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]),
                *(e[8], e[9], e[10], e[11], e[12], e[13], e[14], e[15]),
            )
            low, high = block * bytes_, block * bytes_ + bytes_
            rest = high - bytes_ % 32
            for at in range(low, rest, 32):
                some, made = codes[at : at + 32], out[2 * at : 2 * at + 64]
                for j in range(32):
                    _put_pair(made, j, some[j], v)
            for at in range(rest, high, 16):
                some, made = codes[at : at + 16], out[2 * at : 2 * at + 32]
                for j in range(16):
                    _put_pair(made, j, some[j], v)


def fill(format: Codebook, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: bfloat16 or float32."""
    absmax, block = format.sizes(parts), format.block
    kind = rounding(format.dtype, out.dtype)
    entries, flat, whole = array(format.table(parts)), out.view(-1), out.numel() // block * block

    def fill_blocks(codes: Tensor, absmax: Tensor, out: Tensor) -> None:
        packed, sizes, values = array(codes), array(absmax), array(out)
        parallel_for(
            lambda start, end: _fill(packed, sizes, entries, block // 2, kind, values, start, end),
            len(sizes),
            len(values),
        )

    codes = parts["codes"].view(-1)
    fill_blocks(codes[: whole // 2], absmax[: whole // block], flat[:whole])
    if whole < len(flat):  # a shorter last block, padded to a whole one
        padded, values = codes.new_zeros(block // 2), out.new_empty(block)
        padded[: len(codes) - whole // 2] = codes[whole // 2 :]
        fill_blocks(padded, absmax[-1:], values)
        flat[whole:] = values[: len(flat) - whole]


def row_dequantizer(
    format: Codebook, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
) -> RowDequantizer:
    """Return a dequantizer equal to `fill`, for weights whose rows contain whole blocks."""
    codes, sizes, table = (array(each) for each in (parts["codes"], format.sizes(parts), format.table(parts)))
    return RowDequantizer(_filling(format.dtype == torch.float16), (codes, sizes, table), format.block)


@cache
def _filling(halves: bool) -> int:
    def fill(
        codes: Any, absmax: Any, table: Any, block: int, columns: int, row: int, place: int, count: int,
        out: Any,
    ) -> None:  # fmt: skip
        start = row * columns + place
        sizes = carray(absmax, (start + count) // block, np.float32)[start // block :]
        base, target = carray(table, 16, np.float32), carray(out, count, np.uint16).ctypes.data
        source = carray(codes, 1, np.uint8).ctypes.data + start // 2
        fetch_ahead(source + AHEAD * columns // 2, count // 2)
        fetch_ahead(sizes.ctypes.data + 4 * (AHEAD * columns // block), 4 * len(sizes))
        for at in range(len(sizes)):
            size = sizes[at]
            for done in range(at * block, (at + 1) * block, 32):
                at_codes, made = source + done // 2, target + 2 * done
                if halves:
                    halves_high_first(at_codes, base.ctypes.data, size, size, made)
                else:
                    look_up_high_first(at_codes, base.ctypes.data, size, size, made)

    return compile_fill(fill)

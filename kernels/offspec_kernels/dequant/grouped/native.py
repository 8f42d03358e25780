"""Compiled loops for the CPU, one for each number of bits."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.avx512 import AHEAD, fetch_ahead, has_lookups, shifted_high, shifted_low
from offspec_kernels.dequant.format import RowDequantizer, Shape
from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.dequant.native import array, carray, compile_fill, half, inlined, put

_FROM_ZERO = np.arange(16, dtype=np.float32)
_MANY = 16  # groups at once: reading bytes right after storing them as words would stall


@inlined
def _fill8(codes: Any, step: Any, offset: Any, out: Any) -> None:
    for group in range(len(step)):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 64 : group * 64 + 64], out[group * 64 : group * 64 + 64]
        for j in range(64):
            put(values, j, np.float32(np.int32(bytes_[j])) * s + o)


@inlined
def _fill4(codes: Any, step: Any, offset: Any, out: Any) -> None:
    for group in range(len(step)):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 32 : group * 32 + 32], out[group * 64 : group * 64 + 64]
        for j in range(32):
            put(values, j, np.float32(np.int32(bytes_[j] & 15)) * s + o)
            put(values, j + 32, np.float32(np.int32(bytes_[j] >> 4)) * s + o)


@inlined
def _look_up4(codes: Any, step: Any, offset: Any, out: Any) -> None:
    """Run `_fill4` for bfloat16 by register lookup."""
    source, target = codes.ctypes.data, out.ctypes.data
    for group in range(len(step)):
        s, o = half(step[group]), half(offset[group])
        shifted_low(source + group * 32, _FROM_ZERO.ctypes.data, s, o, target + group * 128)
        shifted_high(source + group * 32, _FROM_ZERO.ctypes.data, s, o, target + group * 128 + 64)


@inlined
def _codes3(words: Any, codes: Any) -> None:
    """Unpack 8 words of 8 codes from a group's 3 words: a shift and a mask move the bits of eight codes."""
    for part in range(8):
        two = (words[part & 1] >> np.uint64(2 * (part >> 1))) & np.uint64(0x0303030303030303)
        high = (words[2] >> np.uint64(part)) & np.uint64(0x0101010101010101)
        codes[part] = two | (high << np.uint64(2))


@inlined
def _fill3(packed: Any, step: Any, offset: Any, out: Any) -> None:
    words, codes = packed.view(np.uint64), np.empty(8 * _MANY, np.uint64)
    bytes_ = codes.view(np.uint8)
    for first in range(0, len(step), _MANY):
        last = min(first + _MANY, len(step))
        for group in range(first, last):
            at = (group - first) * 8
            _codes3(words[group * 3 : group * 3 + 3], codes[at : at + 8])
        for group in range(first, last):
            s, o = half(step[group]), half(offset[group])
            at = (group - first) * 64
            code, values = bytes_[at : at + 64], out[group * 64 : group * 64 + 64]
            for j in range(64):
                put(values, j, np.float32(np.int32(code[j])) * s + o)


@inlined
def _fill2(codes: Any, step: Any, offset: Any, out: Any) -> None:
    for group in range(len(step)):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 16 : group * 16 + 16], out[group * 64 : group * 64 + 64]
        for j in range(16):
            put(values, j, np.float32(np.int32(bytes_[j] & 3)) * s + o)
            put(values, j + 16, np.float32(np.int32((bytes_[j] >> 2) & 3)) * s + o)
            put(values, j + 32, np.float32(np.int32((bytes_[j] >> 4) & 3)) * s + o)
            put(values, j + 48, np.float32(np.int32(bytes_[j] >> 6)) * s + o)


_GROUPS = {2: _fill2, 3: _fill3, 4: _fill4, 8: _fill8}


def row_dequantizer(
    format: Grouped, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype
) -> RowDequantizer:
    codes, step, offset = (array(parts[name]) for name in ("codes", "step", "offset"))
    return RowDequantizer(_filling(format.bits, dtype == torch.float32), (codes, step, offset))


@cache
def _filling(bits: int, floats: bool) -> int:
    size, kind = 8 * bits, np.float32 if floats else np.uint16
    groups = _look_up4 if bits == 4 and not floats and has_lookups() else _GROUPS[bits]

    def fill(
        codes: Any, step: Any, offset: Any, _: int, columns: int, row: int, place: int, count: int, out: Any
    ) -> None:
        start = (row * columns + place) // 64
        end, behind = start + count // 64, AHEAD * columns // 64
        bytes_ = carray(codes, end * size, np.uint8)[start * size :]
        steps = carray(step, end, np.uint16)[start:]
        offsets = carray(offset, end, np.uint16)[start:]
        fetch_ahead(bytes_.ctypes.data + behind * size, len(bytes_))
        fetch_ahead(steps.ctypes.data + 2 * behind, 2 * len(steps))
        fetch_ahead(offsets.ctypes.data + 2 * behind, 2 * len(offsets))
        groups(bytes_, steps, offsets, carray(out, count, kind))

    return compile_fill(fill)

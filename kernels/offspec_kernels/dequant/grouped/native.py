"""Compiled loops for the CPU, one for each number of bits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from offspec_kernels.dequant.native import array, compiled, half, inlined, put
from offspec_kernels.dequant.threads import spread


@compiled
def _fill8(codes: Any, step: Any, offset: Any, out: Any, start: int, end: int) -> None:
    for group in range(start, end):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 64 : group * 64 + 64], out[group * 64 : group * 64 + 64]
        for j in range(64):
            put(values, j, np.float32(np.int32(bytes_[j])) * s + o)


@compiled
def _fill4(codes: Any, step: Any, offset: Any, out: Any, start: int, end: int) -> None:
    for group in range(start, end):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 32 : group * 32 + 32], out[group * 64 : group * 64 + 64]
        for j in range(32):
            put(values, j, np.float32(np.int32(bytes_[j] & 15)) * s + o)
            put(values, j + 32, np.float32(np.int32(bytes_[j] >> 4)) * s + o)


@inlined
def _codes3(words: Any, codes: Any) -> None:
    """Codes, 8 words of 8 bytes, from a group's 3 words: a shift and a mask move the bits of eight codes."""
    for part in range(8):
        two = (words[part & 1] >> np.uint64(2 * (part >> 1))) & np.uint64(0x0303030303030303)
        high = (words[2] >> np.uint64(part)) & np.uint64(0x0101010101010101)
        codes[part] = two | (high << np.uint64(2))


@compiled
def _fill3(words: Any, step: Any, offset: Any, out: Any, start: int, end: int) -> None:
    many = 16  # groups at once: what was just stored as words would have to be waited for as bytes
    codes = np.empty(8 * many, np.uint64)
    bytes_ = codes.view(np.uint8)
    for first in range(start, end, many):
        last = min(first + many, end)
        for group in range(first, last):
            at = (group - first) * 8
            _codes3(words[group * 3 : group * 3 + 3], codes[at : at + 8])
        for group in range(first, last):
            s, o = half(step[group]), half(offset[group])
            at = (group - first) * 64
            code, values = bytes_[at : at + 64], out[group * 64 : group * 64 + 64]
            for j in range(64):
                put(values, j, np.float32(np.int32(code[j])) * s + o)


@compiled
def _fill2(codes: Any, step: Any, offset: Any, out: Any, start: int, end: int) -> None:
    for group in range(start, end):
        s, o = half(step[group]), half(offset[group])
        bytes_, values = codes[group * 16 : group * 16 + 16], out[group * 64 : group * 64 + 64]
        for j in range(16):
            put(values, j, np.float32(np.int32(bytes_[j] & 3)) * s + o)
            put(values, j + 16, np.float32(np.int32((bytes_[j] >> 2) & 3)) * s + o)
            put(values, j + 32, np.float32(np.int32((bytes_[j] >> 4) & 3)) * s + o)
            put(values, j + 48, np.float32(np.int32(bytes_[j] >> 6)) * s + o)


_LOOPS = {2: _fill2, 3: _fill3, 4: _fill4, 8: _fill8}


def fill(bits: int, parts: Mapping[str, Tensor], out: Tensor) -> None:
    codes, step, offset = (array(parts[name]) for name in ("codes", "step", "offset"))
    if bits == 3:
        codes = codes.view(np.uint64)
    values, loop = array(out), _LOOPS[bits]
    spread(lambda start, end: loop(codes, step, offset, values, start, end), len(step), out.numel())

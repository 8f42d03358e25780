"""Decoders of a row of blocks of 32 values, to be compiled: uint8 to float32, or to bfloat16 as uint16.

Sums of integers are cut back to 32 bits at once: numba makes them 64 bits wide, which halves the speed.
"""

from typing import Any

import numpy as np

from offspec_kernels.dequant.float4.native import value_of
from offspec_kernels.dequant.native import half, inlined, put


@inlined
def half_at(bytes_: Any, start: int) -> Any:
    """The float32 of the float16 at a byte."""
    bits: Any = np.int32(np.int32(bytes_[start]) | np.int32(bytes_[start + 1]) << np.int32(8))
    return half(bits)


@inlined
def real(code: Any, zero: int) -> Any:
    """The float32 of a code less the one that stands for 0."""
    return np.float32(np.int32(np.int32(code) - np.int32(zero)))


@inlined
def _q4_0(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 18, values[block * 32 : block * 32 + 32]
        d, codes = half_at(bytes_, start), bytes_[start + 2 : start + 18]
        for j in range(16):
            put(target, j, d * real(codes[j] & 15, 8))
            put(target, j + 16, d * real(codes[j] >> 4, 8))


@inlined
def _q4_1(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 20, values[block * 32 : block * 32 + 32]
        d, least, codes = half_at(bytes_, start), half_at(bytes_, start + 2), bytes_[start + 4 : start + 20]
        for j in range(16):
            put(target, j, d * real(codes[j] & 15, 0) + least)
            put(target, j + 16, d * real(codes[j] >> 4, 0) + least)


@inlined
def _fifth_bits(bytes_: Any, start: int) -> Any:
    """The 32 high bits of a block's codes, the first value's lowest."""
    low = np.uint32(bytes_[start]) | np.uint32(bytes_[start + 1]) << np.uint32(8)
    high = np.uint32(bytes_[start + 2]) | np.uint32(bytes_[start + 3]) << np.uint32(8)
    return np.uint32(low | high << np.uint32(16))


@inlined
def _with_fifth(code: Any, fifths: Any, j: int) -> Any:
    """A code of four bits with its fifth."""
    fifth = np.uint32(np.uint32(fifths >> np.uint32(j)) & np.uint32(1))
    return np.uint32(np.uint32(code) | np.uint32(fifth << np.uint32(4)))


@inlined
def _q5_0(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 22, values[block * 32 : block * 32 + 32]
        d, fifths = half_at(bytes_, start), _fifth_bits(bytes_, start + 2)
        codes = bytes_[start + 6 : start + 22]
        for j in range(16):
            put(target, j, d * real(_with_fifth(codes[j] & 15, fifths, j), 16))
            put(target, j + 16, d * real(_with_fifth(codes[j] >> 4, fifths, j + 16), 16))


@inlined
def _q5_1(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 24, values[block * 32 : block * 32 + 32]
        d, least = half_at(bytes_, start), half_at(bytes_, start + 2)
        fifths, codes = _fifth_bits(bytes_, start + 4), bytes_[start + 8 : start + 24]
        for j in range(16):
            put(target, j, d * real(_with_fifth(codes[j] & 15, fifths, j), 0) + least)
            put(target, j + 16, d * real(_with_fifth(codes[j] >> 4, fifths, j + 16), 0) + least)


@inlined
def _q8_0(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 34, values[block * 32 : block * 32 + 32]
        d, codes = half_at(bytes_, start), bytes_[start + 2 : start + 34]
        for j in range(32):
            put(target, j, d * real(np.int8(codes[j]), 0))


@inlined
def looked_up(code: Any) -> Any:
    """The IQ4 types' codebook by a code of 4 bits: four numbers to a word, which is faster than a table."""
    word = np.uint32(0xBFAD9881) if code < 4 else np.uint32(0xF6EADDCF)
    word = word if code < 8 else (np.uint32(0x26190D01) if code < 12 else np.uint32(0x71594535))
    shift = np.uint32((np.uint32(code) & np.uint32(3)) << np.uint32(3))
    return real(np.int8(np.uint32(word >> shift)), 0)


@inlined
def _iq4_nl(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 18, values[block * 32 : block * 32 + 32]
        d, codes = half_at(bytes_, start), bytes_[start + 2 : start + 18]
        for j in range(16):
            put(target, j, d * looked_up(codes[j] & np.uint8(15)))
            put(target, j + 16, d * looked_up(codes[j] >> np.uint8(4)))


@inlined
def power_of_two(byte: int) -> Any:
    """2 to the exponent less 128, float32."""
    exponent = np.uint32(byte)
    normal, small = np.uint32((exponent - np.uint32(1)) << np.uint32(23)), np.uint32(1 << 21) << exponent
    bits = np.uint32(small) if exponent < np.uint32(2) else np.uint32(normal)
    return np.uint32(bits).view(np.float32)


@inlined
def _mxfp4(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 32):
        start, target = block * 17, values[block * 32 : block * 32 + 32]
        d, codes = power_of_two(bytes_[start]), bytes_[start + 1 : start + 17]
        for j in range(16):
            low = value_of(np.uint8(codes[j] & np.uint8(15)), 1)
            high = value_of(np.uint8(codes[j] >> np.uint8(4)), 1)
            put(target, j, d * (low + np.float32(0.0)))  # lest 0 have a sign
            put(target, j + 16, d * (high + np.float32(0.0)))


DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
}

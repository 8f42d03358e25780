"""Decoders of a row of blocks, to be compiled: uint8 to float32, or to bfloat16 as uint16.

Integer sums are cast back to 32 bits at once: numba makes them 64 bits wide, which halves the speed.

In blocks of 256 values a byte contains bits of two or four values that are 32 or 64 apart. An innermost loop
processes the bytes that share the same scales.
"""

from typing import Any

import numpy as np

from offspec_kernels.dequant.float4.native import value_of
from offspec_kernels.dequant.native import half, inlined, put


@inlined
def half_at(bytes_: Any, start: int) -> Any:
    """Return the float32 of the float16 at a byte."""
    bits: Any = np.int32(np.int32(bytes_[start]) | np.int32(bytes_[start + 1]) << np.int32(8))
    return half(bits)


@inlined
def real(code: Any, zero: int) -> Any:
    """Return the float32 of a code minus the code that represents 0."""
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
    """Return the 32 high bits of a block's codes, the first value's lowest."""
    low = np.uint32(bytes_[start]) | np.uint32(bytes_[start + 1]) << np.uint32(8)
    high = np.uint32(bytes_[start + 2]) | np.uint32(bytes_[start + 3]) << np.uint32(8)
    return np.uint32(low | high << np.uint32(16))


@inlined
def _with_fifth(code: Any, fifths: Any, j: int) -> Any:
    """Return a 4-bit code with its fifth bit."""
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
def iq4_value(code: Any) -> Any:
    """Return the IQ4 codebook value of a 4-bit code; four numbers per word are faster than a table."""
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
            put(target, j, d * iq4_value(codes[j] & np.uint8(15)))
            put(target, j + 16, d * iq4_value(codes[j] >> np.uint8(4)))


@inlined
def power_of_two(byte: int) -> Any:
    """Return 2^(exponent - 128), float32."""
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
            put(target, j, d * (low + np.float32(0.0)))  # so that 0 has no sign
            put(target, j + 16, d * (high + np.float32(0.0)))


@inlined
def _q2_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 84 : block * 84 + 84], values[block * 256 : block * 256 + 256]
        d, lowest = half_at(data, 80), half_at(data, 82)
        for part in range(4):  # a half, and in it the first or second 16 of 32 values
            group = part // 2 * 8 + part % 2
            codes, places = data[16 + part * 16 : 32 + part * 16], target[group * 16 : group * 16 + 112]
            scale0, least0 = d * real(data[group] & 15, 0), lowest * real(data[group] >> 4, 0)
            scale1, least1 = d * real(data[group + 2] & 15, 0), lowest * real(data[group + 2] >> 4, 0)
            scale2, least2 = d * real(data[group + 4] & 15, 0), lowest * real(data[group + 4] >> 4, 0)
            scale3, least3 = d * real(data[group + 6] & 15, 0), lowest * real(data[group + 6] >> 4, 0)
            for j in range(16):
                put(places, j, scale0 * real(codes[j] & 3, 0) - least0)
                put(places, j + 32, scale1 * real(codes[j] >> 2 & 3, 0) - least1)
                put(places, j + 64, scale2 * real(codes[j] >> 4 & 3, 0) - least2)
                put(places, j + 96, scale3 * real(codes[j] >> 6, 0) - least3)


@inlined
def _q3_scale(packed: Any, group: int) -> Any:
    """Return one of the 16 6-bit scales in 12 bytes."""
    four = np.int32(packed[group] & 15 if group < 8 else packed[group - 8] >> 4)
    two = np.int32(packed[8 + group % 4] >> (group // 4 * 2) & 3)
    return real(four | two << 4, 32)


@inlined
def _q3_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 110 : block * 110 + 110], values[block * 256 : block * 256 + 256]
        d, packed = half_at(data, 108), data[96:108]
        for part in range(4):
            group, bit = part // 2 * 8 + part % 2, np.uint32(part // 2 * 4)
            codes, places = data[32 + part * 16 : 48 + part * 16], target[group * 16 : group * 16 + 112]
            thirds = data[part % 2 * 16 : part % 2 * 16 + 16]
            scale0, scale1 = d * _q3_scale(packed, group), d * _q3_scale(packed, group + 2)
            scale2, scale3 = d * _q3_scale(packed, group + 4), d * _q3_scale(packed, group + 6)
            for j in range(16):
                third = np.uint32(np.uint32(thirds[j]) >> bit)
                put(places, j, scale0 * real(codes[j] & 3 | (third & 1) << 2, 4))
                put(places, j + 32, scale1 * real(codes[j] >> 2 & 3 | (third & 2) << 1, 4))
                put(places, j + 64, scale2 * real(codes[j] >> 4 & 3 | third & 4, 4))
                put(places, j + 96, scale3 * real(codes[j] >> 6 | (third & 8) >> 1, 4))


@inlined
def scale_and_min(packed: Any, group: int) -> tuple[Any, Any]:
    """Return a 6-bit scale and a 6-bit offset from the 12 bytes of a Q4_K or Q5_K block."""
    if group < 4:
        return real(packed[group] & 63, 0), real(packed[group + 4] & 63, 0)
    both, first, second = packed[group + 4], packed[group - 4], packed[group]
    return real(both & 15 | first >> 6 << 4, 0), real(both >> 4 | second >> 6 << 4, 0)


@inlined
def _q4_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 144 : block * 144 + 144], values[block * 256 : block * 256 + 256]
        d, lowest, packed = half_at(data, 0), half_at(data, 2), data[4:16]
        for pair in range(4):
            scale0, least0 = scale_and_min(packed, pair * 2)
            scale1, least1 = scale_and_min(packed, pair * 2 + 1)
            scale0, least0, scale1, least1 = d * scale0, lowest * least0, d * scale1, lowest * least1
            codes, places = data[16 + pair * 32 : 48 + pair * 32], target[pair * 64 : pair * 64 + 64]
            for j in range(32):
                put(places, j, scale0 * real(codes[j] & 15, 0) - least0)
                put(places, j + 32, scale1 * real(codes[j] >> 4, 0) - least1)


@inlined
def _q5_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 176 : block * 176 + 176], values[block * 256 : block * 256 + 256]
        d, lowest, packed, fifths = half_at(data, 0), half_at(data, 2), data[4:16], data[16:48]
        for pair in range(4):
            scale0, least0 = scale_and_min(packed, pair * 2)
            scale1, least1 = scale_and_min(packed, pair * 2 + 1)
            scale0, least0, scale1, least1 = d * scale0, lowest * least0, d * scale1, lowest * least1
            codes, places = data[48 + pair * 32 : 80 + pair * 32], target[pair * 64 : pair * 64 + 64]
            for j in range(32):
                fifth = np.uint32(np.uint32(fifths[j]) >> np.uint32(pair * 2))
                put(places, j, scale0 * real(codes[j] & 15 | (fifth & 1) << 4, 0) - least0)
                put(places, j + 32, scale1 * real(codes[j] >> 4 | (fifth & 2) << 3, 0) - least1)


@inlined
def _q6_k(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 210 : block * 210 + 210], values[block * 256 : block * 256 + 256]
        d, scales = half_at(data, 208), data[192:208]
        for part in range(4):
            group = part // 2 * 8 + part % 2
            start = part // 2 * 64 + part % 2 * 16
            first, second = data[start : start + 16], data[start + 32 : start + 48]
            high, places = data[128 + part * 16 : 144 + part * 16], target[group * 16 : group * 16 + 112]
            scale0, scale1 = d * real(np.int8(scales[group]), 0), d * real(np.int8(scales[group + 2]), 0)
            scale2, scale3 = d * real(np.int8(scales[group + 4]), 0), d * real(np.int8(scales[group + 6]), 0)
            for j in range(16):
                put(places, j, scale0 * real(first[j] & 15 | (high[j] & 3) << 4, 32))
                put(places, j + 32, scale1 * real(second[j] & 15 | (high[j] & 12) << 2, 32))
                put(places, j + 64, scale2 * real(first[j] >> 4 | high[j] & 48, 32))
                put(places, j + 96, scale3 * real(second[j] >> 4 | (high[j] & 192) >> 2, 32))


@inlined
def _iq4_xs(bytes_: Any, values: Any) -> None:
    for block in range(len(values) // 256):
        data, target = bytes_[block * 136 : block * 136 + 136], values[block * 256 : block * 256 + 256]
        d, twos = half_at(data, 0), np.int32(np.int32(data[2]) | np.int32(data[3]) << np.int32(8))
        for group in range(8):
            four = data[4 + group // 2] >> (group % 2 * 4) & 15
            scale = d * real(four | (twos >> (group * 2) & 3) << 4, 32)
            codes, places = data[8 + group * 16 : 24 + group * 16], target[group * 32 : group * 32 + 32]
            for j in range(16):
                put(places, j, scale * iq4_value(codes[j] & np.uint8(15)))
                put(places, j + 16, scale * iq4_value(codes[j] >> np.uint8(4)))


DECODERS = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "IQ4_NL": _iq4_nl,
    "MXFP4": _mxfp4,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}

"""Pieces of compiled loops: unpacking codes, and rounding products to the dtype of the scales."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import compiled, in_bfloat16, in_half, inlined, put

NONE, HALF, ANY_HALF, BFLOAT = range(4)
BLOCK = 4096  # columns processed at once: few enough for the L1 cache, enough for whole pages of values


def rounding(dtype: torch.dtype | None, out: torch.dtype) -> int:
    """Return how values of a dtype (None: float32) are rounded before they are written to `out`."""
    if dtype in (None, torch.float32, out):
        return NONE
    return BFLOAT if dtype == torch.bfloat16 else ANY_HALF


def rounding_of(scales: Tensor, dtype: torch.dtype, largest: int, out: torch.dtype) -> int:
    """Return the `rounding` of products of float32 scales of a dtype and integers up to ±`largest`."""
    kind = rounding(dtype, out)
    if kind != ANY_HALF:
        return kind
    low, high = (float(each) * largest for each in scales.aminmax())
    return HALF if max(-low, high) <= 65504.0 else ANY_HALF


@inlined
def rounded(product: Any, kind: Any) -> Any:
    """Round a float32 product in one of the ways above.

    kind: constant within a loop; the compiler specializes the loop for it. HALF: for a product of a float16
    and an integer, a multiple of 2^-24, the smallest float16, so that only its leading 11 bits matter.
    """
    if kind == NONE:
        return np.float32(product)
    if kind == BFLOAT:
        return in_bfloat16(product)
    if kind == ANY_HALF:
        return in_half(product)
    bits = np.float32(product).view(np.uint32)
    even = np.uint32(bits >> np.uint32(13)) & np.uint32(1)
    return np.uint32(np.uint32(bits + np.uint32(0xFFF) + even) & np.uint32(0xFFFFE000)).view(np.float32)


@inlined
def scaled_columns(codes: Any, zeros: Any, scales: Any, kind: Any, out: Any) -> None:
    """Dequantize a row in which each column has its own zero and scale; scales float32."""
    for column in range(len(out)):
        difference = np.int32(codes[column]) - np.int32(zeros[column])
        put(out, column, rounded(np.float32(np.int32(difference)) * scales[column], kind))


@inlined
def unpack_stream(words: Any, bits: int, codes: Any) -> None:
    """Unpack the first codes, uint8, of a stream of bits in words."""
    groups = words.view(np.uint8)
    if bits == 8:
        for j in range(len(codes)):
            codes[j] = groups[j]
    elif bits == 4 and len(codes) % 2 == 0:
        for j in range(len(codes) // 2):
            codes[2 * j], codes[2 * j + 1] = groups[j] & np.uint8(15), groups[j] >> np.uint8(4)
    else:
        held, count, word = np.uint64(0), 0, 0
        for j in range(len(codes)):
            if count < bits:
                held |= np.uint64(np.uint32(words[word])) << np.uint64(count)
                count, word = count + 32, word + 1
            codes[j] = np.uint8(held & np.uint64((1 << bits) - 1))
            held >>= np.uint64(bits)
            count -= bits


@inlined
def unpack_across(words: Any, later: Any, bits: int, offset: int, codes: Any) -> None:
    """Unpack one code, uint8, of each of many adjacent streams.

    words: words in which the codes begin, at bit `offset`; later: the streams' next words, which contain the
    rest of codes that cross a word boundary.
    """
    mask = np.uint32((1 << bits) - 1)
    if offset + bits <= 32:
        for j in range(len(words)):
            codes[j] = np.uint8(np.uint32(np.uint32(words[j]) >> np.uint32(offset)) & mask)
    else:
        for j in range(len(words)):
            begun = np.uint32(np.uint32(words[j]) >> np.uint32(offset))
            ended = np.uint32(np.uint32(later[j]) << np.uint32(32 - offset))
            codes[j] = np.uint8((begun | ended) & mask)


@compiled
def unpacked(words: Any, bits: int, later: int, codes: Any) -> None:
    """Unpack codes, uint8; later: added to each code, modulo 2^bits."""
    unpack_stream(words, bits, codes)
    if later:
        for place in range(len(codes)):
            codes[place] = (codes[place] + np.uint8(later)) & np.uint8((1 << bits) - 1)

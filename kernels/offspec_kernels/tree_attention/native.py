"""Attention loops over single numbers, compiled for a CPU: keys near a row, and the weights of a block.

Each loop processes a row on its own and in a fixed order, so its bits depend only on the row's own numbers.

Letters: KV key heads, G query heads per key head, n rows, P places in a row's list of keys, K keys of a
block, D and E elements of a key and a value.
"""

from functools import partial
from typing import Any

import numpy as np

from offspec_kernels.dequant.native import Array, compiled, from_bfloat16, fused, inlined, widen
from offspec_kernels.tree_attention.sizes import AT_ONCE

LOG2E = 1.4426950408889634
_NO_KEY = np.float32(-1e4)  # a score, relative to the largest, with weight zero
_ROUNDER = np.float32(12582912.0)  # 1.5 2^23: a float32 of this size is an integer
# ln(2)^k / k! for k = 7 down to 1: 2^f within a relative 2^-27, for f up to one half.
_C7, _C6, _C5, _C4, _C3, _C2, _C1 = map(
    np.float32,
    (1.5252734e-5, 1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1),
)

_summed = partial(compiled, allow=frozenset({"contract", "reassoc", "nnan", "nsz"}))


@inlined
def exp2(x: Any) -> Any:
    """Return 2^x in float32 for x up to about 100; zero below -126, NaN for NaN."""
    shifted = (np.float32(-126.0) if x < np.float32(-126.0) else x) + _ROUNDER
    f = x - (shifted - _ROUNDER)
    p = ((((((_C7 * f + _C6) * f + _C5) * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + np.float32(1.0)
    scaled = _times_power(p, shifted)
    return np.float32(0.0) if x < np.float32(-126.0) else scaled


@inlined
def _narrow_exp2(x: Any) -> Any:
    """Return 2^x as bfloat16 bits: `exp2` with only the terms that matter at that precision."""
    shifted = (np.float32(-126.0) if x < np.float32(-126.0) else x) + _ROUNDER
    f = x - (shifted - _ROUNDER)
    p = (((_C4 * f + _C3) * f + _C2) * f + _C1) * f + np.float32(1.0)
    bits = np.float32(_times_power(p, shifted)).view(np.uint32)
    even = np.uint32(bits >> np.uint32(16)) & np.uint32(1)
    near = np.uint32(np.uint32(bits + np.uint32(0x7FFF) + even) >> np.uint32(16))
    return np.uint16(0) if x < np.float32(-126.0) else np.uint16(near)


@inlined
def _times_power(p: Any, shifted: Any) -> Any:
    """Return p 2^i, where the last bits of `shifted` are the integer i."""
    power = np.uint32(np.float32(shifted).view(np.uint32) << np.uint32(23))
    return np.uint32(np.float32(p).view(np.uint32) + power).view(np.float32)


@inlined
def _capped(score: Any, cap: Any) -> Any:
    power = score / cap * np.float32(2.0 * LOG2E)
    power = np.float32(100.0) if power > np.float32(100.0) else power
    return cap * (np.float32(1.0) - np.float32(2.0) / (exp2(power) + np.float32(1.0)))


# Numba checks each index for a negative value (from the end). Slicing rows first avoids the check.
@_summed
def _score_keys(
    query: Array, keys: Array, stride: int, chosen: Array, is_half: bool, wide: Array, scores: Array
) -> None:
    """Compute scores [G, P] of queries [G, D] and the key rows `chosen` [n]."""
    size = len(wide)
    for j in range(len(chosen)):
        widen(keys[chosen[j] * stride : chosen[j] * stride + size], is_half, wide)
        for g in range(len(query)):
            total = np.float32(0.0)
            for d in range(size):
                total += query[g, d] * wide[d]
            scores[g, j] = total


@_summed
def _largest(scores: Array, row: int, count: int) -> Any:
    highest = scores[row, 0]
    for j in range(1, count):
        highest = max(highest, scores[row, j])
    return highest


@fused
def _weigh(scores: Array, row: int, count: int, top: float) -> None:
    for j in range(count):
        scores[row, j] = exp2(scores[row, j] - top)


@_summed
def _sum(weights: Array, row: int, count: int) -> Any:
    total = np.float32(0.0)
    for j in range(count):
        total += weights[row, j]
    return total


@fused
def _bring_values(
    weights: Array, values: Array, stride: int, chosen: Array, is_half: bool, wide: Array, acc: Array
) -> None:
    """Add value rows `chosen` [P] to acc [G, E], four at a time but in sequential order."""
    size = acc.shape[1]
    acc[:] = np.float32(0.0)
    for j in range(0, len(chosen), 4):
        for k in range(4):
            widen(values[chosen[j + k] * stride : chosen[j + k] * stride + size], is_half, wide[k])
        for g in range(len(acc)):
            a, b, c, d = weights[g, j], weights[g, j + 1], weights[g, j + 2], weights[g, j + 3]
            for e in range(size):
                acc[g, e] = acc[g, e] + a * wide[0, e] + b * wide[1, e] + c * wide[2, e] + d * wide[3, e]


@compiled
def attend_listed_keys(
    query: Array, key: Array, value: Array, key_at: Array, value_at: Array, lists: Array, counts: Array,
    is_half: bool, cap: float, acc: Array, top: Array, total: Array, start: int, end: int,
) -> None:  # fmt: skip
    """Attend items [start, end) to their listed keys; an item is a row of a key head.

    Args:
        query: [KV, G n or more, D] float32, the queries of a row adjacent, scaled so that scores are in
            powers of two. Passed whole, so that it is contiguous: numba compiles again for other layouts.
        key, value: flat float32, or 16-bit floats as uint16.
        key_at, value_at: [2] int64: strides from head to head, and from row to row.
        lists, counts: [n, P] and [n] int32: key rows in order of position, and the number of valid entries.
        is_half: Whether 16-bit floats are float16 and not bfloat16.
        cap: Soft cap of the scores in powers of two; zero for none.
        acc: [KV, n, G, E], overwritten by the sum of weighted values, with weights 2^(score - top).
        top, total: [KV, n, G], overwritten by the largest score and the sum of weights.
    """
    rows, groups, size = acc.shape[1], acc.shape[2], query.shape[2]
    asked, scores = np.empty((groups, size), np.float32), np.empty((groups, lists.shape[1]), np.float32)
    wide_key, wide_values = np.empty(size, np.float32), np.empty((4, acc.shape[3]), np.float32)
    for item in range(start, end):
        head, row = item // rows, item % rows
        count = counts[row]
        padded = (count + AT_ONCE - 1) // AT_ONCE * AT_ONCE
        asked[:] = query[head, row * groups : (row + 1) * groups]
        keys, values = key[head * key_at[0] :], value[head * value_at[0] :]
        _score_keys(asked, keys, key_at[1], lists[row, :count], is_half, wide_key, scores)
        for g in range(groups):
            if cap:
                for j in range(count):
                    scores[g, j] = _capped(scores[g, j], np.float32(cap))
            highest = _largest(scores, g, count)
            for j in range(count, padded):
                scores[g, j] = highest + _NO_KEY
            _weigh(scores, g, padded, highest)
            top[head, row, g], total[head, row, g] = highest, _sum(scores, g, padded)
        _bring_values(scores, values, value_at[1], lists[row, :padded], is_half, wide_values, acc[head, row])


@fused
def powers(x: Array, out: Array) -> None:
    """Compute 2^x of float32 numbers up to about 100; a result does not depend on its place in the array."""
    for i in range(len(x)):
        out[i] = exp2(x[i])


@_summed
def scale(scores: Array, factor: float) -> Any:
    """Multiply scores [K] and return the largest as `weigh_narrow` reads it, bit for bit."""
    for j in range(len(scores)):
        scores[j] = scores[j] * factor
    highest = scores[0]
    for j in range(1, len(scores)):
        highest = max(highest, scores[j])
    return highest


@fused
def weigh_narrow(scores: Array, top: float, weights: Array) -> None:
    """Compute 2^(scores [K] - top) as bfloat16 bits."""
    for j in range(len(scores)):
        weights[j] = _narrow_exp2(scores[j] - top)


@compiled
def shrink(sums: Array, factor: float) -> None:
    for e in range(len(sums)):
        sums[e] = sums[e] * factor


@compiled
def copy(source: Array, out: Array) -> None:
    """Copy to the beginning of `out`. Slice assignment could allocate memory, since it checks for overlap."""
    for e in range(len(source)):
        out[e] = source[e]


@_summed
def narrow_sum(weights: Array) -> Any:
    total = np.float32(0.0)
    for j in range(len(weights)):
        total += from_bfloat16(weights[j])
    return total


@compiled
def weigh_wide(
    scores: Array, cap: float, tops: Array, totals: Array, shrink: Array, start: int, end: int
) -> None:
    """Turn scores [R, K] float32 of rows [start, end) into weights relative to the largest score so far.

    tops and totals [R] are updated; earlier sums are to be multiplied by shrink [R].
    """
    for row in range(start, end):
        if cap:
            for j in range(scores.shape[1]):
                scores[row, j] = _capped(scores[row, j], np.float32(cap))
        highest = max(tops[row], _largest(scores, row, scores.shape[1]))
        _weigh(scores, row, scores.shape[1], highest)
        shrink[row] = exp2(tops[row] - highest)
        totals[row] = totals[row] * shrink[row] + _sum(scores, row, scores.shape[1])
        tops[row] = highest


@compiled
def list_keys(
    words: Array, ranks: Array, bounds: Array, shared: int, lists: Array, counts: Array, anchors: Array
) -> None:
    """List the keys near each row, in order of position.

    Args:
        words: [n, W] int64, see `TreeMask`.
        ranks: [n] int64: position of a row, which is the number of keys before its own.
        bounds: [n, 3] int64: the first visible position, and the positions [low, end) that are not near.
        shared: Positions whose key row equals the position; later keys are of the row's own branch.
        lists: [n, P] int32, overwritten; counts: [n] int32, overwritten by the number of keys.
        anchors: [n] int64, overwritten by the key row at the last position that is not near, if that is in
            the branch, else by -1: rows with the same anchor share all those keys.
    """
    branch = np.empty(words.shape[1] * 64, np.int32)
    for row in range(len(words)):
        length = 0
        for word in range(words.shape[1]):
            for bit in range(64):
                if (words[row, word] >> bit) & 1:
                    branch[length] = shared + word * 64 + bit
                    length += 1
        start, low, end = bounds[row]
        anchors[row] = branch[end - 1 - shared] if end > low and end > shared else -1
        count = 0
        for position in range(start, ranks[row] + 1):
            if position < low or position >= end:
                lists[row, count] = position if position < shared else branch[position - shared]
                count += 1
        counts[row] = count
        for place in range(count, lists.shape[1]):
            lists[row, place] = lists[row, count - 1]  # the row's own key, with weight zero

"""Compiled float4 loop for the CPU: 16 bytes at once, whose values are computed from their bits."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.float4 import Float4
from offspec_kernels.dequant.native import array, compiled, inlined, put
from offspec_kernels.dequant.scaled.native import rounded, rounding
from offspec_kernels.dequant.threads import parallel_for


@inlined
def value_of(code: Any, doubled: int) -> Any:
    """Return the float32 of a 4-bit code, doubled if `doubled` is 1; a table would be read value by value."""
    size = np.uint32(np.uint32(code) & np.uint32(7))
    sign = np.uint32(np.uint32(np.uint32(code) & np.uint32(8)) << np.uint32(28))
    # With an exponent of 0, these bits would represent other numbers.
    normal = np.uint32(np.uint32(size << np.uint32(22)) + np.uint32((126 + doubled) << 23)).view(np.float32)
    small = np.float32(np.int32(size)) * np.float32(0.5 + 0.5 * doubled)
    value = small if size < np.uint32(2) else normal
    return np.uint32(np.float32(value).view(np.uint32) | sign).view(np.float32)


@cache
def _loop(kind: int, doubled: int, each: int) -> Callable[..., None]:
    """Return the loop for bytes [start, end), times 16, with `each` scales (one or two) per 16 bytes.

    The compiler knows the constants of all values, and so does not vectorize choices.
    """

    @compiled
    def loop(codes: Any, scales: Any, out: Any, start: int, end: int) -> None:
        for group in range(start, end):
            first, second = scales[each * group], scales[each * group + each - 1]
            some, values = codes[group * 16 : group * 16 + 16], out[group * 32 : group * 32 + 32]
            for j in range(16):
                scale = first if j < 8 else second
                low, high = np.uint8(some[j] & np.uint8(15)), np.uint8(some[j] >> np.uint8(4))
                put(values, 2 * j, rounded(value_of(low, doubled) * scale, kind))
                put(values, 2 * j + 1, rounded(value_of(high, doubled) * scale, kind))

    return loop


@compiled
def _look_up(table: Any, bytes_: Any, out: Any, start: int, end: int) -> None:
    for i in range(start, end):
        out[i] = table[bytes_[i]]


def _looked_up(table: Tensor, bytes_: Tensor) -> Tensor:
    """Index table [256] by bytes of any shape, float32 [bytes]; torch would convert to integers first."""
    found = torch.empty(bytes_.numel())
    entries, packed, values = array(table), array(bytes_), array(found)
    parallel_for(lambda start, end: _look_up(entries, packed, values, start, end), len(found), len(found))
    return found


def fill(format: Float4, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: bfloat16 or float32."""
    sizes = _looked_up(format.sizes(parts), parts[format.scales])  # one per 8 or 16 bytes
    kind = rounding(format.dtype, out.dtype)
    codes, flat = parts[format.codes].view(-1), out.view(-1)
    groups = len(codes) // 16
    loop = _loop(kind, int(format.doubled), 1 if len(sizes) * 16 == len(codes) else 2)
    packed, scales, values = array(codes), array(sizes), array(flat)
    parallel_for(lambda start, end: loop(packed, scales, values, start, end), groups, len(flat))
    if groups * 16 < len(codes):  # a last block of 8 bytes, padded to 16
        padded, two, made = codes.new_zeros(16), sizes.new_zeros(2), flat.new_empty(32)
        padded[:8], two[0] = codes[-8:], sizes[-1]
        loop(array(padded), array(two), array(made), 0, 1)
        flat[-16:] = made[:16]

"""Compiled float8 loop for the CPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.native import array, compiled, inlined, put
from offspec_kernels.dequant.scaled.native import rounded, rounding
from offspec_kernels.dequant.threads import parallel_for


@inlined
def _value(byte: Any) -> Any:
    """Convert float8_e4m3fn: its bits are a float32's whose exponent is 120 less, subnormal or not."""
    size = np.uint32(np.uint32(byte & np.uint8(0x7F)) << np.uint32(20))
    sign = np.uint32(np.uint32(byte & np.uint8(0x80)) << np.uint32(24))
    value = np.uint32(size | sign).view(np.float32) * np.float32(2.0**120)
    return np.float32(np.nan) if size == np.uint32(0x7F << 20) else value


@compiled
def _fill(weight: Any, scales: Any, high: int, wide: int, kind: int, out: Any, start: int, end: int) -> None:
    """Fill blocks; scales: [blocks of rows, blocks of columns]; a block is `high` by `wide`."""
    columns = out.shape[1]
    for row in range(start, end):
        for block in range(scales.shape[1]):
            scale = scales[row // high, block]
            first, behind = block * wide, min(block * wide + wide, columns)
            some, values = weight[row, first:behind], out[row, first:behind]
            for j in range(len(values)):
                put(values, j, rounded(_value(some[j]) * scale, kind))


def fill(format: Float8, parts: Mapping[str, Tensor], out: Tensor) -> None:
    out = out.flatten(0, -2)
    rows, columns = out.shape
    high, wide = format.block_of((rows, columns))
    scales = array(parts["scale"].float()).reshape(-(-rows // high), -1)
    weight, values = (array(each).reshape(rows, columns) for each in (parts["weight"], out))
    kind = rounding(format.scales if format.rounded else None, out.dtype)
    parallel_for(
        lambda start, end: _fill(weight, scales, high, wide, kind, values, start, end), rows, out.numel()
    )

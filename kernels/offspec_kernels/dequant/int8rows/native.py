"""Compiled int8 loop for the CPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from offspec_kernels.dequant.int8rows import STEP, Int8Rows
from offspec_kernels.dequant.native import array, compiled, put
from offspec_kernels.dequant.threads import parallel_for

_STEP = np.float32(STEP)


@compiled
def _fill(codes: Any, scale: Any, out: Any, columns: int, start: int, end: int) -> None:
    for row in range(start, end):
        some, values = codes[row * columns : (row + 1) * columns], out[row * columns : (row + 1) * columns]
        for j in range(columns):
            put(values, j, np.float32(some[j]) * scale[row] * _STEP)


def fill(format: Int8Rows, parts: Mapping[str, Tensor], out: Tensor) -> None:
    packed, scales, values = (array(each) for each in (parts["codes"], parts["scale"], out))
    columns = parts["codes"].shape[1]
    parallel_for(
        lambda start, end: _fill(packed, scales, values, columns, start, end), len(scales), out.numel()
    )

"""The product with a weight that lies as [K, N]: panels of its columns, each two rows of them interleaved.

So the processor wants them beside the input's rows, which are taken as they lie.

Letters: T rows, K columns, N rows of the weight.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import array, compiled, put
from offspec_kernels.dequant.threads import spread_product
from offspec_kernels.row_linear.brgemm import call_product, call_release, find_brgemm

_WIDE = 64  # columns of a panel
PIECE = 1024  # columns of a row; the same at any T, as the end of an uneven K is added in an order by it
_GROUP = 512  # rows of the input that go through a panel together


def is_turned(weight: Tensor) -> bool:
    """Whether a weight [N, K], K even, lies as [K, N] without gaps."""
    return weight.stride(1) != 1 and weight.mT.is_contiguous()


def row_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [T, K], weight [N, K] that lies as [K, N]."""
    found = find_brgemm()
    assert found is not None, "ask has_blocks first"
    (count, columns), width = rows.shape, len(weight)
    out = torch.empty((count, width), dtype=rows.dtype)
    if count == 0 or width == 0:
        return out
    given, values, made = array(rows.contiguous()), array(weight.mT), array(out)

    def work(start: int, end: int) -> None:
        panel = torch.empty(PIECE * _WIDE, dtype=torch.bfloat16)
        sums = torch.empty(min(count, _GROUP) * _WIDE)
        _multiply(
            *found, given, values, array(panel), array(sums), made, count, columns, width, start * _WIDE,
            min(end * _WIDE, width),
        )  # fmt: skip

    spread_product(work, -(-width // _WIDE), weight.numel(), count)
    return out


@compiled
def _multiply(
    product: int, release: int, rows: Any, values: Any, panel: Any, sums: Any, out: Any, count: int,
    columns: int, width: int, start: int, end: int,
) -> None:  # fmt: skip
    """Columns [start, end) of out [T, width]. Behind the weight's last column a panel has zeros."""
    for first in range(start, end, _WIDE):
        wide = min(end - first, _WIDE)
        for group in range(0, count, _GROUP):
            some = min(count - group, _GROUP)
            for place in range(0, columns, PIECE):
                size = min(columns - place, PIECE)
                for row in range(0, size, 2):
                    at = (place + row) * width + first
                    one, two = values[at : at + wide], values[at + width : at + width + wide]
                    made = panel[row * _WIDE : (row + 2) * _WIDE]
                    for column in range(np.uint64(wide)):
                        made[2 * column], made[2 * column + np.uint64(1)] = one[column], two[column]
                    made[2 * wide :] = 0
                given = rows[group * columns + place :]
                call_product(product, (
                    some, _WIDE, size, columns, _WIDE, _WIDE, 1 if place else 0, given.ctypes.data,
                    panel.ctypes.data, sums.ctypes.data, 1,
                ))  # fmt: skip
            for row in range(some):
                at, near = (group + row) * width + first, sums[row * _WIDE : row * _WIDE + wide]
                made = out[at : at + wide]
                for column in range(wide):
                    put(made, column, near[column])
    call_release(release, (1,))

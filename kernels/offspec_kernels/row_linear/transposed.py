"""Product with a weight stored as [K, N]: panels of its columns, with pairs of rows interleaved.

The CPU needs this layout for the second factor; the input's rows are read in place.

Letters: T rows, K columns, N rows of the weight.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.format import RowDequantizer
from offspec_kernels.dequant.native import WIDE, array, call_fill, compiled, inlined, put
from offspec_kernels.dequant.threads import parallel_for_product
from offspec_kernels.row_linear.brgemm import call_product, call_release, find_brgemm

PIECE = (
    1024  # columns per piece; the same for any T, since it determines the order of sums at an uneven K's end
)
_GROUP = 512  # input rows multiplied by a panel together
_ROWS, _FEW = 64, 16  # rows of a product; the remainder uses multiples of 16


def is_transposed(weight: Tensor) -> bool:
    """Return whether a weight [N, K], K even, is stored as [K, N] without gaps."""
    return weight.stride(1) != 1 and weight.mT.is_contiguous()


def multiply(rows: Tensor, weight: Tensor | RowDequantizer, width: int) -> Tensor:
    """Multiply rows [T, K], K even, by a weight [N, K], N = `width`, stored or dequantized as [K, N]."""
    found = find_brgemm()
    assert found is not None, "ask has_blocks first"
    count, columns = rows.shape
    out = torch.empty((count, width), dtype=rows.dtype)
    if count == 0 or width == 0:
        return out
    # Padded with zero rows to a multiple of 16: oneDNN compiles, and keeps, a product for each row count.
    given, made = array(F.pad(rows, (0, 0, 0, -count % _FEW)).contiguous()), array(out)
    fill, parts, number, stored = 0, (0, 0, 0), 0, None
    if isinstance(weight, RowDequantizer):
        fill, parts, number = weight.address, weight.pointers, weight.number
    else:
        stored = array(weight.mT)

    def work(start: int, end: int) -> None:
        values = array(torch.empty(PIECE * WIDE, dtype=torch.bfloat16)) if stored is None else stored
        panel, sums = torch.empty(PIECE * WIDE, dtype=torch.bfloat16), torch.empty(_GROUP * WIDE)
        _multiply(
            *found, fill, parts, number, given, values, array(panel), array(sums), made, count, columns,
            width, start * WIDE, min(end * WIDE, width),
        )  # fmt: skip

    parallel_for_product(work, -(-width // WIDE), width * columns, count)
    return out


@inlined
def _interleave(values: Any, stride: int, wide: int, size: int, panel: Any) -> None:
    """Interleave pairs of `size` rows of `wide` columns, `stride` apart; zeros after the last column."""
    for row in range(0, size, 2):
        one, two = values[row * stride :], values[(row + 1) * stride :]
        made = panel[row * WIDE : (row + 2) * WIDE]
        for column in range(np.uint64(wide)):
            made[2 * column], made[2 * column + np.uint64(1)] = one[column], two[column]
        made[2 * wide :] = 0


@inlined
def _add_piece(
    product: int, rows: Any, count: int, columns: int, place: int, size: int, panel: Any, sums: Any
) -> None:
    for first in range(0, count, _ROWS):
        high, given = min((count - first + _FEW - 1) // _FEW * _FEW, _ROWS), rows[first * columns + place :]
        call_product(product, (
            high, WIDE, size, columns, WIDE, WIDE, 1 if place else 0, given.ctypes.data, panel.ctypes.data,
            sums[first * WIDE :].ctypes.data, 1,
        ))  # fmt: skip


@inlined
def _store(sums: Any, count: int, wide: int, out: Any, width: int) -> None:
    for row in range(count):
        near, made = sums[row * WIDE : row * WIDE + wide], out[row * width : row * width + wide]
        for column in range(wide):
            put(made, column, near[column])


@compiled
def _multiply(
    product: int, release: int, fill: int, parts: Any, number: int, rows: Any, values: Any, panel: Any,
    sums: Any, out: Any, count: int, columns: int, width: int, start: int, end: int,
) -> None:  # fmt: skip
    """Compute columns [start, end) of out [T, width]; values: the whole weight, or a buffer for `fill`."""
    one, two, three = parts
    for first in range(start, end, WIDE):
        wide = min(end - first, WIDE)
        for group in range(0, count, _GROUP):
            some = min(count - group, _GROUP)
            for place in range(0, columns, PIECE):
                size = min(columns - place, PIECE)
                if fill:
                    call_fill(fill, (one, two, three, number, width, place, first, size, values.ctypes.data))
                    _interleave(values, WIDE, wide, size, panel)
                else:
                    _interleave(values[place * width + first :], width, wide, size, panel)
                _add_piece(product, rows[group * columns :], some, columns, place, size, panel, sums)
            _store(sums, some, wide, out[group * width + first :], width)
    call_release(release, (1,))

"""The product with a weight that lies as [K, N]: panels of its columns, each two rows of them interleaved.

So the processor wants them beside the input's rows, which are taken as they lie.

Letters: T rows, K columns, N rows of the weight.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.format import Filler
from offspec_kernels.dequant.native import WIDE, array, call_fill, compiled, inlined, put
from offspec_kernels.dequant.threads import spread_product
from offspec_kernels.row_linear.brgemm import call_product, call_release, find_brgemm

PIECE = 1024  # columns of a row; the same at any T, as the end of an uneven K is added in an order by it
_GROUP = 512  # rows of the input that go through a panel together
_ROWS, _FEW = 64, 16  # of them in a product, or as many times 16 as are left


def is_turned(weight: Tensor) -> bool:
    """Whether a weight [N, K], K even, lies as [K, N] without gaps."""
    return weight.stride(1) != 1 and weight.mT.is_contiguous()


def multiply(rows: Tensor, weight: Tensor | Filler, width: int) -> Tensor:
    """[T, N] of rows [T, K], K even, and a weight [N, K], N = `width`, that lies as [K, N] or is made so."""
    found = find_brgemm()
    assert found is not None, "ask has_blocks first"
    count, columns = rows.shape
    out = torch.empty((count, width), dtype=rows.dtype)
    if count == 0 or width == 0:
        return out
    # With rows of zeros to a multiple of 16: oneDNN compiles, and keeps, a product for each number.
    given, made = array(F.pad(rows, (0, 0, 0, -count % _FEW)).contiguous()), array(out)
    fill, parts, number, stored = 0, (0, 0, 0), 0, None
    if isinstance(weight, Filler):
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

    spread_product(work, -(-width // WIDE), width * columns, count)
    return out


@inlined
def _interleave(values: Any, stride: int, wide: int, size: int, panel: Any) -> None:
    """Each two of `size` rows of `wide` columns, `stride` apart; behind the last column zeros."""
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
    """Columns [start, end) of out [T, width]. values: of all the weight, or memory for what `fill` makes."""
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

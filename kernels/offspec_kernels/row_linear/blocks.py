"""The product on a CPU in bfloat16, in blocks: each sums up its K terms in one order, however many rows.

A panel is some rows of the weight, as they lie; 64 rows of the input at a time are laid out beside them as
the processor multiplies them. So the weight, of which there is most, is read once and never rearranged, and a
panel that was just made (`packed_linear`) is multiplied while it lies in a core's own cache.

Letters: T rows, K columns, N rows of the weight.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.native import Array, array, compiled, inlined, put
from offspec_kernels.dequant.threads import spread
from offspec_kernels.row_linear.brgemm import Addresses, call_product, call_release, find_brgemm

_ROWS = 64  # of the input in a block; the last block has a multiple of 16
_PANEL_BYTES = 1 << 20  # of a core's own cache of 1 or 2 MB
_LEAST, _MOST = 16, 256  # rows of a panel
_SHARED = 1 << 21  # values of a weight that threads share: to give out work takes some 0.2 ms


class RowBlocks:
    """Rows [T, K] bfloat16, K even, laid out for `multiply`: blocks [K / 2, rows of a block, 2]."""

    def __init__(self, rows: Tensor) -> None:
        found = find_brgemm()
        assert found is not None, "ask has_blocks first"
        self._addresses: Addresses = found
        self.count, self.columns = rows.shape
        words = array(rows.contiguous().view(torch.int32))
        self._packed = np.empty(-(-self.count // 16) * 16 * self.columns // 2, np.int32)
        blocks = -(-self.count // _ROWS)
        width = self.columns // 2
        spread(
            lambda start, end: _pack(words, self.count, width, self._packed, start, end),
            blocks,
            len(words),
        )

    def multiply(self, values: Array, height: int, out: Array, width: int, start: int, end: int) -> None:
        """Columns [start, end) of out [T, width], flat, with rows of the weight in panels of `height`.

        values: [end - start, K] flat, both as 16-bit words.
        """
        _multiply(
            *self._addresses, values, height, self._packed, self.count, self.columns, out, width, start, end
        )


def panel_height(columns: int) -> int:
    """Rows of a weight with so many columns that are multiplied together."""
    return min(max(_PANEL_BYTES // (2 * columns) // _LEAST * _LEAST, _LEAST), _MOST)


def row_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [T, K], weight [N, K] with rows in one piece; copied if there are gaps, or K is odd."""
    if rows.shape[1] % 2:
        rows, weight = F.pad(rows, (0, 1)), F.pad(weight, (0, 1))
    weight = weight.contiguous()
    count, width = len(rows), len(weight)
    out = torch.empty((count, width), dtype=rows.dtype)
    if count == 0 or width == 0:
        return out
    height, columns = panel_height(weight.shape[1]), weight.shape[1]
    blocks, values, made = RowBlocks(rows), array(weight), array(out)

    def work(start: int, end: int) -> None:
        start, end = start * height, min(end * height, width)
        some = values[start * columns : end * columns]
        blocks.multiply(some, height, made, width, start, end)

    panels = -(-width // height)
    if weight.numel() < _SHARED:
        work(0, panels)
    else:
        spread(work, panels, weight.numel())
    return out


def has_blocks(rows: Tensor, weight: Tensor) -> bool:
    """Whether these can be multiplied here."""
    fits = rows.device.type == weight.device.type == "cpu" and rows.dtype == weight.dtype == torch.bfloat16
    return fits and weight.shape[1] > 0 and weight.stride(1) == 1 and works()


@cache
def works() -> bool:
    """Whether torch and the processor have the product, and rows have the same bits at any count."""
    if find_brgemm() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 1056, generator=generator).bfloat16() for size in (130, 300))
    many = row_linear(rows, weight)
    if not torch.allclose(many.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.5):
        return False
    return all(torch.equal(row_linear(rows[:few], weight), many[:few]) for few in (1, 2, 16, 17, 64, 65))


@compiled
def _pack(words: Any, count: int, width: int, packed: Any, start: int, end: int) -> None:
    """words: [T, width], a pair of numbers each; blocks [start, end)."""
    for block in range(start, end):
        first = block * _ROWS
        rows = min(count - first, _ROWS)
        wide = (rows + 15) // 16 * 16
        made = packed[first * width : (first + wide) * width]
        for k in range(0, width, 16):  # a line of the cache of each row
            most = min(width - k, 16)
            for row in range(wide):
                some = words[(first + row) * width + k : (first + row) * width + k + most]
                for j in range(most):
                    made[(k + j) * wide + row] = some[j] if row < rows else 0


@inlined
def _store(sums: Any, near: Any, wide: int, high: int, out: Any, at: int, width: int, rows: int) -> None:
    """sums [high, wide] to `rows` rows of out, each `width` behind the one before, from `at` on.

    near: memory for as many rounded. Indices that cannot be negative are not looked at again.
    """
    for place in range(high * wide):
        put(near, place, sums[place])
    for row in range(rows):
        made = out[at + row * width : at + row * width + high]
        for j in range(np.uint64(high)):
            made[j] = near[j * np.uint64(wide) + np.uint64(row)]


@compiled
def _multiply(
    product: int, release: int, values: Any, height: int, packed: Any, count: int, columns: int, out: Any,
    width: int, start: int, end: int,
) -> None:  # fmt: skip
    sums, near = np.empty(height * _ROWS, np.float32), np.empty(height * _ROWS, out.dtype)
    for place in range(start, end, height):
        high = min(height, end - place)
        panel = values[(place - start) * columns : (place - start + high) * columns]
        for first in range(0, count, _ROWS):
            rows = min(count - first, _ROWS)
            wide = (rows + 15) // 16 * 16
            block = packed[first * (columns // 2) :]
            call_product(product, (
                high, wide, columns, columns, wide, wide, 0, panel.ctypes.data, block.ctypes.data,
                sums.ctypes.data, 1,
            ))  # fmt: skip
            _store(sums, near, wide, high, out, first * width + place, width, rows)
    call_release(release, (1,))

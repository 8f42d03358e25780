"""Product on a CPU in bfloat16, in blocks that sum K terms in the same order for any number of rows.

A weight [N, K] is multiplied in panels of its rows, in place, by the input's rows, which are rearranged as
the CPU multiplies them. So the weight, the larger operand, is read once and never rearranged. A panel may be
dequantized just before (`packed_linear`); it is multiplied while it is in a core's own cache. A weight stored
as [K, N] is rearranged in panels of columns (`transposed`).

K is processed in pieces, so that the rows of a piece stay in the cache, and sums accumulate in float32. The
pieces are the same for any T: they determine the order in which the end of an uneven K is added.

Letters: T rows, K columns, N rows of the weight.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.format import RowDequantizer
from offspec_kernels.dequant.native import (
    Array,
    array,
    call_fill,
    carray,
    claim,
    compile_job,
    compiled,
    inlined,
    pointer,
    put,
)
from offspec_kernels.dequant.threads import parallel_for, parallel_for_product, run_parallel
from offspec_kernels.row_linear import transposed
from offspec_kernels.row_linear.brgemm import Addresses, call_product, call_release, find_brgemm
from offspec_kernels.row_linear.transposed import PIECE

_ROWS = 64  # input rows in a block; the last block has a multiple of 16
_GROUP = 512  # input rows multiplied by a panel together
_FEW = 16  # a panel must fit into a core's own cache with this many rows
_FEW_BYTES, _PANEL_BYTES = 1 << 20, 1 << 22
_MOST = 256  # maximum rows of a panel
_FILLED = 128  # rows of a panel that is dequantized piece by piece
_MANY = (
    2048  # minimum rows of a weight for panels of that height; a smaller weight would have too few to share
)
_WORDS = 17  # argument words of a loop over such panels: two counters, addresses and sizes
_STRIDE = PIECE + 32  # values from row to row: with powers of two, rows would map to the same cache set
UNIT = 16  # a panel's row count is a multiple of this


class RowBlocks:
    """Rows [T, K] bfloat16, K even, rearranged for `multiply`.

    Layout: groups of rows; in each, pieces of columns; in each, blocks [piece / 2, rows of a block, 2].
    """

    def __init__(self, rows: Tensor) -> None:
        found = find_brgemm()
        assert found is not None, "ask has_blocks first"
        self._addresses: Addresses = found
        self.count, self.columns = rows.shape
        if rows.storage_offset() % 2 or not rows.is_contiguous():
            rows = rows.clone(memory_format=torch.contiguous_format)
        words = array(rows.view(torch.int32))
        # torch's memory is aligned to a cache line. Without alignment, every load would touch two lines.
        self._laid = torch.empty(-(-self.count // 16) * 16 * self.columns // 2, dtype=torch.int32)
        self._packed = array(self._laid)
        parallel_for(
            lambda start, end: _pack(words, self.count, self.columns // 2, self._packed, start, end),
            -(-self.count // _ROWS),
            len(words),
        )

    def multiply(self, width: int, panel: Callable[[int, int], Array]) -> Tensor:
        """Return [T, N], N = `width`, the product with a weight whose rows panel(first, end) returns.

        Panels are flat, [end - first, K] as 16-bit words, and valid until the thread requests the next one.
        """
        out = torch.empty((self.count, width), dtype=torch.bfloat16)
        height, made = panel_height(self.columns, self.count), array(out)

        def work(start: int, end: int) -> None:
            end = min(end * UNIT, width)
            for first in range(start * UNIT, end, height):
                behind = min(first + height, end)
                sums = array(torch.empty((behind - first) * self._padded, dtype=torch.float32))
                _multiply(
                    *self._addresses, panel(first, behind), self._packed, self.count, self.columns, sums,
                    made, width, first, behind,
                )  # fmt: skip

        parallel_for_product(work, -(-width // UNIT), width * self.columns, self.count)
        return out

    def multiply_filled(self, filler: RowDequantizer, width: int) -> Tensor:
        """Return [T, N], N = `width`, with a weight whose panels `filler` dequantizes as they are needed."""
        out = torch.empty((self.count, width), dtype=torch.bfloat16)
        if not self.count:
            return out
        own = _FILLED * (2 * _STRIDE + 4 * self._padded + 2 * _ROWS)
        memory = torch.empty(torch.get_num_threads() * own, dtype=torch.uint8)
        job = np.array((
            0, 0, *self._addresses, filler.address, *filler.pointers,
            filler.number, width, _FILLED if width >= _MANY else _FILLED // 4, self.columns,
            self._laid.data_ptr(), self.count, memory.data_ptr(), own, out.data_ptr(),
        ))  # fmt: skip
        assert len(job) == _WORDS
        run_parallel(
            compile_job(_fill_and_multiply), job, (filler, self._laid, memory, out), width * self.columns
        )
        return out

    @property
    def _padded(self) -> int:
        return -(-self.count // 16) * 16


def panel_bytes(count: int) -> int:
    """Return the bytes that all threads use for panels and their sums with `count` rows."""
    return torch.get_num_threads() * (_PANEL_BYTES + _MOST * (count + 16) * 4)


def panel_height(columns: int, count: int) -> int:
    """Return the number of weight rows with `columns` columns multiplied together with `count` rows."""
    nbytes = _FEW_BYTES if count <= _FEW else _PANEL_BYTES
    return min(max(nbytes // (2 * columns) // UNIT * UNIT, UNIT), _MOST)


def row_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply rows [T, K] by weight [N, K], contiguous along one dimension; copies if strided or K odd."""
    if rows.shape[1] % 2:
        rows, weight = F.pad(rows, (0, 1)), F.pad(weight, (0, 1))
    if transposed.is_transposed(weight):
        return transposed.multiply(rows, weight, len(weight))
    weight = weight.contiguous()
    if len(rows) == 0 or len(weight) == 0:
        return torch.empty((len(rows), len(weight)), dtype=rows.dtype)
    columns, values = weight.shape[1], array(weight)
    return RowBlocks(rows).multiply(
        len(weight), lambda first, behind: values[first * columns : behind * columns]
    )


def replaces_torch() -> bool:
    """Return whether all products should use this module because torch's bits depend on the row count.

    This is so with a matrix unit (AMX), where oneDNN splits K depending on the whole shape. On other CPUs
    torch's products are faster with few rows.
    """
    return bool(torch.cpu._is_amx_tile_supported()) and is_supported()


def can_multiply(rows: Tensor, weight: Tensor) -> bool:
    """Return whether this module can multiply these tensors."""
    fits = rows.device.type == weight.device.type == "cpu" and rows.dtype == weight.dtype == torch.bfloat16
    return fits and weight.shape[1] > 0 and is_supported()


@cache
def is_supported() -> bool:
    """Return whether torch and the CPU have the product and a row's bits do not depend on the row count."""
    if find_brgemm() is None:
        return False
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(size, 1056, generator=generator).bfloat16() for size in (130, 300))
    return all(_works(rows, laid) for laid in (weight, weight.mT.contiguous().mT))


def _works(rows: Tensor, weight: Tensor) -> bool:
    many = row_linear(rows, weight)
    if not torch.allclose(many.float(), rows.float() @ weight.float().T, rtol=0.02, atol=0.5):
        return False
    return all(torch.equal(row_linear(rows[:few], weight), many[:few]) for few in (1, 2, 16, 17, 64, 65))


@compiled
def _pack(words: Any, count: int, width: int, packed: Any, start: int, end: int) -> None:
    """Pack blocks [start, end) of words [T, width], each a pair of numbers."""
    for block in range(start, end):
        first = block * _ROWS
        group = first // _GROUP * _GROUP
        padded = (min(count - group, _GROUP) + 15) // 16 * 16  # padded rows of the group
        wide = min(padded - (first - group), _ROWS)
        for place in range(0, width, PIECE // 2):
            size = min(PIECE // 2, width - place)
            made = packed[group * width + place * padded + (first - group) * size :]
            for k in range(0, size, 16):  # one cache line of each row
                most = min(size - k, 16)
                for row in range(wide):
                    at = (first + row) * width + place + k
                    some = words[at : at + most]
                    for j in range(most):
                        made[(k + j) * wide + row] = some[j] if first + row < count else 0


@inlined
def _store(sums: Any, near: Any, wide: int, high: int, out: Any, at: int, width: int, rows: int) -> None:
    """Store sums [high, wide] to `rows` rows of out, `width` apart, from `at` on.

    near: buffer for the rounded sums. Slices avoid numba's checks for negative indices.
    """
    for place in range(high * wide):
        put(near, place, sums[place])
    for row in range(rows):
        made = out[at + row * width : at + row * width + high]
        for j in range(np.uint64(high)):
            made[j] = near[j * np.uint64(wide) + np.uint64(row)]


@inlined
def _add_piece(
    product: int, values: int, stride: int, high: int, packed: Any, count: int, columns: int, place: int,
    sums: Any,
) -> None:  # fmt: skip
    """Add the products of a piece of columns, from `place` on, to the sums of a panel and all rows.

    values: address of the panel's first value in that piece; stride: values from row to row.
    """
    size = min(PIECE, columns - place)
    for group in range(0, count, _GROUP):
        padded = (min(count - group, _GROUP) + 15) // 16 * 16
        for first in range(0, padded, _ROWS):
            wide = min(padded - first, _ROWS)
            block = packed[(group * columns + place * padded + first * size) // 2 :]
            call_product(product, (
                high, wide, size, stride, wide, wide, 1 if place else 0, values, block.ctypes.data,
                sums[(group + first) * high :].ctypes.data, 1,
            ))  # fmt: skip


@inlined
def _store_all(sums: Any, near: Any, high: int, count: int, out: Any, start: int, width: int) -> None:
    """Store all rows of columns [start, start + high) of out [T, width]."""
    padded = (count + 15) // 16 * 16
    for first in range(0, padded, _ROWS):
        wide, at = min(padded - first, _ROWS), first * width + start
        _store(sums[first * high :], near, wide, high, out, at, width, min(wide, count - first))


@compiled
def _multiply(
    product: int, release: int, values: Any, packed: Any, count: int, columns: int, sums: Any,
    out: Any, width: int, start: int, end: int,
) -> None:  # fmt: skip
    """Multiply panels by all rows; sums: buffer for the sums of a panel and all rows."""
    high = end - start
    for place in range(0, columns, PIECE):
        _add_piece(product, values[place:].ctypes.data, columns, high, packed, count, columns, place, sums)
    _store_all(sums, np.empty(high * _ROWS, out.dtype), high, count, out, start, width)
    call_release(release, (1,))


def _fill_and_multiply(job: Any) -> None:
    """Multiply panels of a weight, which threads claim one by one; `fill` dequantizes a piece of columns."""
    words = carray(job, _WORDS, np.int64)
    product, release, fill, first, second, third, number, width, height = words[2:11]
    columns, given, count, memory, size, target = words[11:]
    padded = (count + 15) // 16 * 16
    packed = carray(pointer(given), padded * columns // 2, np.int32)
    out = carray(pointer(target), count * width, np.uint16)
    own = memory + claim(words[1:].ctypes.data) * size
    sums = carray(pointer(own + 2 * _FILLED * _STRIDE), _FILLED * padded, np.float32)
    near = carray(pointer(own + _FILLED * (2 * _STRIDE + 4 * padded)), _FILLED * _ROWS, np.uint16)
    while True:
        low = claim(words.ctypes.data) * height
        if low >= width:
            break
        high = min(width - low, height)
        for place in range(0, columns, PIECE):
            piece = min(PIECE, columns - place)
            for row in range(high):
                values = own + 2 * row * _STRIDE
                call_fill(fill, (first, second, third, number, columns, low + row, place, piece, values))
            _add_piece(product, own, _STRIDE, high, packed, count, columns, place, sums)
        _store_all(sums, near, high, count, out, low, width)
    call_release(release, (1,))

"""The product on a CPU in bfloat16, in blocks: each sums up its K terms in one order, however many rows.

A weight [N, K] is multiplied in panels of its rows, as they lie, by the input's rows, which are laid out
beside them as the processor multiplies them. So the weight, of which there is most, is read once and never
rearranged. A panel may be made just before (`packed_linear`), and is multiplied while it lies in a core's own
cache. A weight that lies as [K, N] is rearranged in panels of columns (`turned`).

K is taken in pieces, so that what a piece is multiplied with stays in the cache, and sums go on in float32.
The pieces are the same at any T: the order in which the end of an uneven K is added depends on them.

Letters: T rows, K columns, N rows of the weight.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.dequant.format import Filler
from offspec_kernels.dequant.native import (
    Array,
    array,
    call_fill,
    carray,
    claim,
    compiled,
    inlined,
    pointer,
    put,
    sharing,
)
from offspec_kernels.dequant.threads import share, spread, spread_product
from offspec_kernels.row_linear import turned
from offspec_kernels.row_linear.brgemm import Addresses, call_product, call_release, find_brgemm
from offspec_kernels.row_linear.turned import PIECE

_ROWS = 64  # of the input in a block; the last block has a multiple of 16
_GROUP = 512  # rows of the input that go through a panel together
_FEW = 16  # rows with which a panel is to fit into a core's own cache
_FEW_BYTES, _PANEL_BYTES = 1 << 20, 1 << 22
_MOST = 256  # rows of a panel
_FILLED = 128  # rows of one of which a piece at a time is made
_MANY = 2048  # rows of a weight from which on panels are so high; below, there would be few to share
_WORDS = 17  # of what a loop over such panels is given: two counters, addresses and numbers
_STRIDE = PIECE + 32  # values from one such row to the next: powers of two would share a place in the cache
UNIT = 16  # rows of the weight, of which a panel has a multiple


class RowBlocks:
    """Rows [T, K] bfloat16, K even, laid out for `multiply`.

    Groups of rows; in each, pieces of columns; in each, blocks [piece / 2, rows of a block, 2].
    """

    def __init__(self, rows: Tensor) -> None:
        found = find_brgemm()
        assert found is not None, "ask has_blocks first"
        self._addresses: Addresses = found
        self.count, self.columns = rows.shape
        if rows.storage_offset() % 2 or not rows.is_contiguous():
            rows = rows.clone(memory_format=torch.contiguous_format)
        words = array(rows.view(torch.int32))
        # torch's memory begins at a line of the cache. Elsewhere every line that is loaded would be two.
        self._laid = torch.empty(-(-self.count // 16) * 16 * self.columns // 2, dtype=torch.int32)
        self._packed = array(self._laid)
        spread(
            lambda start, end: _pack(words, self.count, self.columns // 2, self._packed, start, end),
            -(-self.count // _ROWS),
            len(words),
        )

    def multiply(self, width: int, panel: Callable[[int, int], Array]) -> Tensor:
        """[T, N], N = `width`, with a weight of which panel(first, behind) has some rows.

        They are flat, [behind - first, K] as 16-bit words, and there until the thread asks for the next.
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

        spread_product(work, -(-width // UNIT), width * self.columns, self.count)
        return out

    def multiply_filled(self, filler: Filler, width: int) -> Tensor:
        """[T, N], N = `width`, with a weight of which `filler` makes each panel as it is multiplied."""
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
        share(sharing(_fill_and_multiply), job, (filler, self._laid, memory, out), width * self.columns)
        return out

    @property
    def _padded(self) -> int:
        return -(-self.count // 16) * 16


def panel_bytes(count: int) -> int:
    """Bytes that all threads take for panels and their sums, beside `count` rows."""
    return torch.get_num_threads() * (_PANEL_BYTES + _MOST * (count + 16) * 4)


def panel_height(columns: int, count: int) -> int:
    """Rows of a weight with so many columns that are multiplied together with `count` rows."""
    nbytes = _FEW_BYTES if count <= _FEW else _PANEL_BYTES
    return min(max(nbytes // (2 * columns) // UNIT * UNIT, UNIT), _MOST)


def row_linear(rows: Tensor, weight: Tensor) -> Tensor:
    """rows [T, K], weight [N, K] contiguous along either dimension; copied if there are gaps, or K is odd."""
    if rows.shape[1] % 2:
        rows, weight = F.pad(rows, (0, 1)), F.pad(weight, (0, 1))
    if turned.is_turned(weight):
        return turned.multiply(rows, weight, len(weight))
    weight = weight.contiguous()
    if len(rows) == 0 or len(weight) == 0:
        return torch.empty((len(rows), len(weight)), dtype=rows.dtype)
    columns, values = weight.shape[1], array(weight)
    return RowBlocks(rows).multiply(
        len(weight), lambda first, behind: values[first * columns : behind * columns]
    )


def replaces_torch() -> bool:
    """Whether all products are to be made so: torch's own give a row other bits at other row counts.

    They do with a matrix unit (AMX), where oneDNN cuts K into pieces by the shape of the whole. Elsewhere
    they are quicker with few rows.
    """
    return bool(torch.cpu._is_amx_tile_supported()) and works()


def has_blocks(rows: Tensor, weight: Tensor) -> bool:
    """Whether these can be multiplied here."""
    fits = rows.device.type == weight.device.type == "cpu" and rows.dtype == weight.dtype == torch.bfloat16
    return fits and weight.shape[1] > 0 and works()


@cache
def works() -> bool:
    """Whether torch and the processor have the product, and rows have the same bits at any count."""
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
    """words: [T, width], a pair of numbers each; blocks [start, end)."""
    for block in range(start, end):
        first = block * _ROWS
        group = first // _GROUP * _GROUP
        padded = (min(count - group, _GROUP) + 15) // 16 * 16  # rows of the group
        wide = min(padded - (first - group), _ROWS)
        for place in range(0, width, PIECE // 2):
            size = min(PIECE // 2, width - place)
            made = packed[group * width + place * padded + (first - group) * size :]
            for k in range(0, size, 16):  # a line of the cache of each row
                most = min(size - k, 16)
                for row in range(wide):
                    at = (first + row) * width + place + k
                    some = words[at : at + most]
                    for j in range(most):
                        made[(k + j) * wide + row] = some[j] if first + row < count else 0


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


@inlined
def _add_piece(
    product: int, values: int, stride: int, high: int, packed: Any, count: int, columns: int, place: int,
    sums: Any,
) -> None:  # fmt: skip
    """Add the products of a piece of columns, from `place` on, to the sums of a panel and all rows.

    values: address of the panel's first in that piece; stride: values from one of its rows to the next.
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
    """All rows of columns [start, start + high) of out [T, width]."""
    padded = (count + 15) // 16 * 16
    for first in range(0, padded, _ROWS):
        wide, at = min(padded - first, _ROWS), first * width + start
        _store(sums[first * high :], near, wide, high, out, at, width, min(wide, count - first))


@compiled
def _multiply(
    product: int, release: int, values: Any, packed: Any, count: int, columns: int, sums: Any,
    out: Any, width: int, start: int, end: int,
) -> None:  # fmt: skip
    """sums: memory for those of a panel and all rows."""
    high = end - start
    for place in range(0, columns, PIECE):
        _add_piece(product, values[place:].ctypes.data, columns, high, packed, count, columns, place, sums)
    _store_all(sums, np.empty(high * _ROWS, out.dtype), high, count, out, start, width)
    call_release(release, (1,))


def _fill_and_multiply(job: Any) -> None:
    """Panels of a weight, which threads claim one by one; `fill` makes a piece of columns at a time."""
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

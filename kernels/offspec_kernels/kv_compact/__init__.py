"""An accepted path's keys and values move to the end of the committed prefix, in all layers at once."""

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.checks import check_device, check_rows
from offspec_kernels.errors import ArgumentError
from offspec_kernels.transfer import upload

_LARGEST_WORD = 8  # bytes


class KVTable:
    """Tensors [heads, C, D] or [1, heads, C, D] on one device, to be compacted together.

    Each may have a shape, a dtype and strides of its own, as long as its last dimension is contiguous; they
    must not overlap. The table keeps them alive, and is of no use for memory that took their place.
    capacity: the smallest C; heads: the largest number of heads.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        if not tensors:
            raise ArgumentError("tensors", "there must be one at least")
        for tensor in tensors:
            if tensor.dim() != 3 and not (tensor.dim() == 4 and tensor.shape[0] == 1):
                raise ArgumentError(
                    "tensors", f"shapes must be [heads, C, D] or [1, heads, C, D], not {list(tensor.shape)}"
                )
            check_device("tensors", tensor, tensors[0].device)
            check_rows("tensors", tensor)
        self.views = tuple(tensor if tensor.dim() == 3 else tensor[0] for tensor in tensors)  # [heads, C, D]
        self.device = tensors[0].device
        self.capacity = min(view.shape[1] for view in self.views)
        self.heads = max(view.shape[0] for view in self.views)

    @cached_property
    def word(self) -> int:
        """Bytes of the largest integer of which all rows and strides are whole multiples."""
        return math.gcd(_LARGEST_WORD, *(number for view in self.views for number in _bytes(view)))

    @cached_property
    def size(self) -> int:
        """Words of the longest row."""
        return max(view.shape[2] * view.element_size() for view in self.views) // self.word

    @cached_property
    def places(self) -> Tensor:
        """[tensors, 5] int64 on the device: address, strides of heads and rows, size of a row, heads.

        Strides and size are in words.
        """
        places = [
            [address, *(number // self.word for number in sizes), view.shape[0]]
            for view in self.views
            for address, *sizes in [_bytes(view)]
        ]
        (found,) = upload([places], self.device)
        return found


def _bytes(view: Tensor) -> tuple[int, int, int, int]:
    """The address, the strides of heads and rows, and the size of a row of [heads, C, D]."""
    width = view.element_size()
    return view.data_ptr(), view.stride(0) * width, view.stride(1) * width, view.shape[2] * width


def kv_compact(table: KVTable, start: int, rows: Sequence[int], *, path: Backend | None = None) -> None:
    """Move row rows[k] of every tensor of `table` to row start + k, in place; no other row changes.

    A row may be read after others were written, since none is written before it was read:
    start + k <= rows[k] < rows[k + 1].

    Args:
        table: The tensors of a KV cache.
        start: First row that is written.
        rows: Rows to move, strictly ascending, from `start` on, inside every tensor.
        path: Backend to use, by default `choose_backend`'s.

    Raises:
        ArgumentError: Names the argument that is wrong.
        PathError: `path` cannot run here.

    Scratch: eager and reference, the moved rows of one tensor; triton, none but the row numbers.
    """
    if start < 0:
        raise ArgumentError("start", f"must be 0 or more, not {start}")
    if any(row >= after for row, after in pairwise(rows)):
        raise ArgumentError("rows", f"must ascend, not {list(rows)}")
    if rows and not start <= rows[0] <= rows[-1] < table.capacity:
        raise ArgumentError(
            "rows", f"must be from {start} to {table.capacity - 1}, not {rows[0]} to {rows[-1]}"
        )
    chosen = choose_backend(table.device, path)
    staying = sum(row == start + index for index, row in enumerate(rows))  # ascending: all of them lead
    start, rows = start + staying, rows[staying:]
    if not rows or not table.heads:
        return
    with torch.no_grad():
        if chosen == "triton":
            from offspec_kernels.kv_compact.triton import move

            move(table, start, rows)
        elif chosen == "eager":
            _eager_move(table, start, rows)
        else:
            _reference_move(table, start, rows)


def _reference_move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    """One row of one head after the other."""
    for view in table.views:
        for head in view:
            for index, row in enumerate(rows):
                head[start + index] = head[row].clone()


def _eager_move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    index = torch.tensor(rows, device=table.device)
    for view in table.views:
        moved = view.index_select(1, index)  # a copy, so that rows are read before any is written
        view[:, start : start + len(rows)].copy_(moved)

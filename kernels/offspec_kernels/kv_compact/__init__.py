"""Moving an accepted path's keys and values to the end of the committed prefix, in all layers at once."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.errors import ArgumentError
from offspec_kernels.kv_compact.table import KVTable


def kv_compact(table: KVTable, start: int, rows: Sequence[int], *, path: Backend | None = None) -> None:
    """Move row rows[k] of every tensor of `table` to row start + k, in place; no other row changes.

    Reading a row after writing others is safe, since no row is written before it is read:
    start + k <= rows[k] < rows[k + 1].

    Args:
        table: Tensors of a KV cache.
        start: First row to write.
        rows: Rows to move, strictly ascending, from `start` on, inside every tensor.
        path: Backend to use; by default the result of `choose_backend`.

    Raises:
        ArgumentError: An argument is invalid; the error names it.
        PathError: `path` cannot run here.

    Workspace: eager and reference, the moved rows of one tensor; triton, only the row numbers.
    """
    if start < 0:
        raise ArgumentError("start", f"must be 0 or more, not {start}")
    if any(row >= after for row, after in pairwise(rows)):
        raise ArgumentError("rows", f"must be strictly ascending, not {list(rows)}")
    if rows and not start <= rows[0] <= rows[-1] < table.capacity:
        raise ArgumentError(
            "rows", f"must be from {start} to {table.capacity - 1}, not {rows[0]} to {rows[-1]}"
        )
    chosen = choose_backend(table.device, path)
    staying = sum(
        row == start + index for index, row in enumerate(rows)
    )  # since rows ascend, these come first
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
    """Copy row by row and head by head."""
    for view in table.views:
        for head in view:
            for index, row in enumerate(rows):
                head[start + index] = head[row].clone()


def _eager_move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    index = torch.tensor(rows, device=table.device)
    for view in table.views:
        moved = view.index_select(1, index)  # a copy, so that all rows are read before any is written
        view[:, start : start + len(rows)].copy_(moved)


__all__ = ["KVTable", "kv_compact"]

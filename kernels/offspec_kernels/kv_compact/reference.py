"""The truth: one row of one head after the other."""

from collections.abc import Sequence

from offspec_kernels.kv_compact.table import KVTable


def move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    for view in table.views:
        for head in view:
            for index, row in enumerate(rows):
                head[start + index] = head[row].clone()

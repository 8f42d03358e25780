"""torch's own operations, a tensor at a time."""

from collections.abc import Sequence

import torch

from offspec_kernels.kv_compact.table import KVTable


def move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    index = torch.tensor(rows, device=table.device)
    for view in table.views:
        moved = view.index_select(1, index)  # a copy, so that rows are read before any is written
        view[:, start : start + len(rows)].copy_(moved)

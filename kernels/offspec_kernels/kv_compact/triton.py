"""GPU kernel of KV compaction: one launch for all tensors, a program for each tensor and head.

Rows move in tiles, and each tile is read before it is written. A tile is written before the rows that later
tiles read, so one barrier per tile is enough. The kernel moves words as large as rows and strides allow,
whatever the dtype.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from offspec_kernels.kv_compact.table import KVTable
from offspec_kernels.transfer import upload

_TILE = 16
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit(do_not_specialize=["start", "count"])
def _move(places, rows, start, count, WORD: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr):
    place = places + tl.program_id(0) * 5
    head = tl.program_id(1)
    if head < tl.load(place + 4):
        words = tl.load(place).to(tl.pointer_type(WORD)) + head * tl.load(place + 1)
        stride, size = tl.load(place + 2), tl.load(place + 3)
        column = tl.arange(0, SIZE)[None, :]
        for first in range(0, count, TILE):
            index = first + tl.arange(0, TILE)
            row = tl.load(rows + index, mask=index < count, other=0)
            inside = (index < count)[:, None] & (column < size)
            moved = tl.load(words + row[:, None] * stride + column, mask=inside, other=0)
            tl.debug_barrier()  # other threads' words of these rows have been read
            tl.store(words + (start + index)[:, None] * stride + column, moved, mask=inside)


def move(table: KVTable, start: int, rows: Sequence[int]) -> None:
    (moved,) = upload([rows], table.device)
    with torch.cuda.device_of(table.pointer_table):
        _move[(len(table.views), table.heads)](
            table.pointer_table, moved, start, len(rows),
            WORD=_WORDS[table.word], SIZE=triton.next_power_of_2(max(table.size, 1)), TILE=_TILE,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

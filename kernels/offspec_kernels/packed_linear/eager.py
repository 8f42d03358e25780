"""Panels of a weight, each unpacked by the thread that multiplies it, in memory that its cache holds.

Letters: T rows, K columns, N rows of the weight.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.native import array
from offspec_kernels.dequant.threads import spread_product
from offspec_kernels.errors import ArgumentError
from offspec_kernels.row_linear import blocks


def can_cut(rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape) -> bool:
    """Whether rows of the weight can be had in panels, and multiplied by themselves."""
    high = min(blocks.UNIT, shape[0])
    usable = high > 0 and shape[1] % 2 == 0 and blocks.has_blocks(rows, rows)
    return usable and format.some_rows(parts, shape, 0, high) is not None


def packed_linear(
    rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape, bias: Tensor | None
) -> Tensor:
    format.check({name: Part(part.dtype, tuple(part.shape)) for name, part in parts.items()}, shape)
    if any(not part.is_contiguous() for part in parts.values()):
        raise ArgumentError("parts", "they must be contiguous")
    width, columns = shape
    out = torch.empty((len(rows), width), dtype=rows.dtype)
    height, given, made = blocks.panel_height(columns, len(rows)), blocks.RowBlocks(rows), array(out)

    def work(start: int, end: int) -> None:
        memory = _panel(height * columns)
        words = array(memory)
        for first, behind in blocks.panels(start, end, width, height):
            values = memory[: (behind - first) * columns].view(behind - first, columns)
            found = format.some_rows(parts, shape, first, behind)
            assert found is not None
            kind, some = found
            kind.eager(some, (behind - first, columns), values)
            given.multiply(words[: values.numel()], made, width, first, behind)

    spread_product(work, -(-width // blocks.UNIT), width * columns, len(rows))
    return out if bias is None else out + bias


_panels = threading.local()


def _panel(values: int) -> Tensor:
    """Memory of this thread, which is kept: fresh pages would take as long as a panel does."""
    kept: Tensor | None = getattr(_panels, "memory", None)
    if kept is None or len(kept) < values:
        kept = _panels.memory = torch.empty(values, dtype=torch.bfloat16)
    return kept[:values]

"""Panels of a weight, each dequantized by the thread that multiplies it, into memory that fits its cache.

Letters: T rows, K columns, N rows of the weight.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.native import Array, array
from offspec_kernels.errors import ArgumentError
from offspec_kernels.row_linear import blocks, transposed
from offspec_kernels.row_linear.transposed import PIECE


def can_multiply(format: Format, shape: Shape) -> bool:
    """Return whether the CPU has the product and the format can produce panels, or parts if necessary."""
    width, columns = shape
    if not width or columns % 2 or not blocks.is_supported():
        return False
    return _fills(format, shape) or (
        blocks.replaces_torch()
        and not format.transposed
        and format.slice_rows(shape, 0, min(blocks.UNIT, width)) is not None
    )


def _fills(format: Format, shape: Shape) -> bool:
    step = format.column_multiple(shape)
    return step > 0 and shape[1] % step == PIECE % step == 0


def packed_linear(
    rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape, bias: Tensor | None
) -> Tensor | None:
    if not (can_multiply(format, shape) and blocks.can_multiply(rows, rows)):
        return None
    format.check({name: Part(part.dtype, tuple(part.shape)) for name, part in parts.items()}, shape)
    if any(not part.is_contiguous() for part in parts.values()):
        raise ArgumentError("parts", "must be contiguous")
    if not _fills(format, shape):
        out = _unpacked(rows, format, parts, shape)
    elif format.transposed:
        out = transposed.multiply(rows, format.row_dequantizer(parts, shape, rows.dtype), shape[0])
    else:
        out = blocks.RowBlocks(rows).multiply_filled(
            format.row_dequantizer(parts, shape, rows.dtype), shape[0]
        )
    return out if bias is None else out + bias


def _unpacked(rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """Multiply panels dequantized one by one, for formats without a row dequantizer."""
    columns = shape[1]

    def panel(first: int, behind: int) -> Array:
        values = _panel((behind - first) * columns)
        found = format.rows_of_parts(parts, shape, first, behind)
        assert found is not None
        kind, some = found
        kind.eager(some, (behind - first, columns), values.view(-1, columns))
        return array(values)

    return blocks.RowBlocks(rows).multiply(shape[0], panel)


_panels = threading.local()


def _panel(values: int) -> Tensor:
    """Return this thread's buffer, kept between calls: fresh pages would take as long as a panel."""
    kept: Tensor | None = getattr(_panels, "memory", None)
    if kept is None or len(kept) < values:
        kept = _panels.memory = torch.empty(values, dtype=torch.bfloat16)
    return kept[:values]

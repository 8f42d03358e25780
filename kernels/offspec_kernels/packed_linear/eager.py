"""Panels of a weight, each unpacked by the thread that multiplies it, in memory that its cache holds.

Letters: T rows, K columns, N rows of the weight.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.native import WIDE, array
from offspec_kernels.dequant.threads import Work, spread_product
from offspec_kernels.errors import ArgumentError
from offspec_kernels.row_linear import blocks, turned
from offspec_kernels.row_linear.turned import PIECE


def has_panels(format: Format, shape: Shape) -> bool:
    """Whether the processor has the product, and the weight can be had in panels or, where need be, parts."""
    width, columns = shape
    if not width or columns % 2 or not blocks.works():
        return False
    return _fills(format, shape) or (
        blocks.replaces_torch()
        and not format.transposed
        and format.cut(shape, 0, min(blocks.UNIT, width)) is not None
    )


def _fills(format: Format, shape: Shape) -> bool:
    step = format.fill_step(shape)
    return step > 0 and shape[1] % step == PIECE % step == 0


def packed_linear(
    rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape, bias: Tensor | None
) -> Tensor | None:
    width, columns = shape
    if not (has_panels(format, shape) and blocks.has_blocks(rows, rows)):
        return None
    format.check({name: Part(part.dtype, tuple(part.shape)) for name, part in parts.items()}, shape)
    if any(not part.is_contiguous() for part in parts.values()):
        raise ArgumentError("parts", "they must be contiguous")
    out = torch.empty((len(rows), width), dtype=rows.dtype)
    make = _filling if _fills(format, shape) else _unpacking
    work, unit = make(rows, format, parts, shape, out), WIDE if format.transposed else blocks.UNIT
    spread_product(work, -(-width // unit), width * columns, len(rows))
    return out if bias is None else out + bias


def _filling(rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> Work:
    """Panels made within a compiled loop."""
    filler, width = format.filler(parts, shape), shape[0]
    if format.transposed:
        laid = turned.padded(rows)
        return lambda start, end: turned.multiply_filled(
            laid, filler, out, start * WIDE, min(end * WIDE, width)
        )
    given, made = blocks.RowBlocks(rows), array(out)

    def work(start: int, end: int) -> None:
        first, behind = start * blocks.UNIT, min(end * blocks.UNIT, width)
        given.multiply_filled(filler, made, width, first, behind)

    return work


def _unpacking(rows: Tensor, format: Format, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> Work:
    """Panels made one by one, as weights are that are unpacked whole."""
    width, columns = shape
    given, made, height = blocks.RowBlocks(rows), array(out), blocks.panel_height(columns, len(rows))

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

    return work


_panels = threading.local()


def _panel(values: int) -> Tensor:
    """Memory of this thread, which is kept: fresh pages would take as long as a panel does."""
    kept: Tensor | None = getattr(_panels, "memory", None)
    if kept is None or len(kept) < values:
        kept = _panels.memory = torch.empty(values, dtype=torch.bfloat16)
    return kept[:values]

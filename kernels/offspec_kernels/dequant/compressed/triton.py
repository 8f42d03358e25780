"""GPU kernel: one value per lane."""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.triton import code_at, launch_tiles, put, scaled, tile


@triton.jit
def _compressed(
    weight, zeros, scales, index, out, rows, columns, group, groups, high, row_words,
    BITS: tl.constexpr, PACKED: tl.constexpr, ZEROS: tl.constexpr, ZEROS_PACKED: tl.constexpr,
    ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile; high: number of rows that share scales."""
    row, column = tile(ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    middle: tl.constexpr = 1 << (BITS - 1)
    if PACKED:
        code = code_at(weight + row * row_words, 1, column, inside, BITS) - middle
    else:
        code = tl.load(weight + row * columns + column, mask=inside, other=0).to(tl.int32)
    if ORDERED:
        of = tl.load(index + column, mask=column < columns, other=0)
        known = inside & (of >= 0) & (of < groups)  # nothing is read for an invalid group
    else:
        known = inside
        of = column // group
    scale_at = row // high * groups + of
    if ZEROS_PACKED:
        code -= code_at(zeros + of, groups, row, known, BITS) - middle
    elif ZEROS:
        code -= tl.load(zeros + scale_at, mask=known, other=0).to(tl.int32)
    scale = tl.load(scales + scale_at, mask=known, other=0.0)
    value = tl.where(known, scaled(code, scale), float("nan"))  # NaN, so that an invalid group is noticed
    put(out, row * columns + column, value, inside)


def fill(format: CompressedInt, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [rows, columns]."""
    rows, columns = out.shape
    group, high = format.group or columns, rows if format.group == 0 else 1
    launch_tiles(
        _compressed,
        [parts.get(name) for name in ("weight", "zero_point", "scale", "g_idx")],
        out,
        [group, columns // group, high, format.words(columns)],
        BITS=format.bits,
        PACKED=format.packed,
        ZEROS=format.zero_point,
        ZEROS_PACKED=format.zero_point and format.packs_zeros,
        ORDERED=format.act_order,
    )

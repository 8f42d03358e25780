"""GPU kernel: one value per lane."""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.triton import code_at, launch_tiles, put, scaled, tile


@triton.jit
def _gptq(
    words, zeros, scales, index, out, rows, columns, group, groups, plus,
    BITS: tl.constexpr, ORDERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column = tile(ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    code = code_at(words + column, columns, row, inside, BITS)
    if ORDERED:
        of = tl.load(index + row, mask=row < rows, other=0).to(tl.int64)
        known = inside & (of >= 0) & (of < groups)  # nothing is read for an invalid group
    else:
        known = inside
        of = row // group
    zero = code_at(zeros + of * (columns * BITS // 32), 1, column, known, BITS)
    scale = tl.load(scales + of * columns + column, mask=known, other=0.0)
    difference = code - ((zero + plus) & ((1 << BITS) - 1))
    value = tl.where(
        known, scaled(difference, scale), float("nan")
    )  # NaN, so that an invalid group is noticed
    put(out, row * columns + column, value, inside)


def fill(format: Gptq, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [in, out]."""
    zeros, scales = format.zero_words(parts["qzeros"]), parts["scales"]
    numbers = [format.group_of(len(out)), len(scales), format.later_plus_one]
    stored = [parts["qweight"], zeros, scales, parts.get("g_idx")]
    launch_tiles(_gptq, stored, out, numbers, BITS=format.bits, ORDERED=format.act_order)

"""GPU kernel: one value per lane; eight lanes read the same word."""

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.triton import launch_tiles, put, scaled, tile


@triton.jit
def _awq(words, zeros, scales, out, rows, columns, group, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tile(ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    shift = (column & 1) * 16 + (column & 6) * 2  # even outputs in the low half of a word, odd in the high
    code = tl.load(words + (row * columns + column) // 8, mask=inside, other=0) >> shift
    scale_at = row // group * columns + column
    zero = tl.load(zeros + scale_at // 8, mask=inside, other=0) >> shift
    scale = tl.load(scales + scale_at, mask=inside, other=0.0)
    put(out, row * columns + column, scaled((code & 15) - (zero & 15), scale), inside)


def fill(format: Awq, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """Fill out: [in, out]."""
    stored = [parts[name] for name in ("qweight", "qzeros", "scales")]
    launch_tiles(_awq, stored, out, [format.group])

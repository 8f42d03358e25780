"""GPU kernel: one value per lane, computed from its bits, since GPUs before Ada cannot read this dtype."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.triton import launch_tiles, put, rounded, tile


@triton.jit
def _float8(
    weight, scales, out, rows, columns, high, wide, ROUNDED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dequantize a tile; weight: uint8; a block has `high` rows and `wide` columns."""
    row, column = tile(ROWS, COLUMNS)
    inside = (row < rows) & (column < columns)
    byte = tl.load(weight + row * columns + column, mask=inside, other=0).to(tl.uint32)
    size = (byte & 0x7F) << 20
    # The bits are a float32's whose exponent is 120 less, subnormal or not.
    value = (size | ((byte & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    value = tl.where(size == 0x7F << 20, float("nan"), value)
    blocks = (columns + wide - 1) // wide
    scale = tl.load(scales + row // high * blocks + column // wide, mask=inside, other=0.0)
    product = value * scale.to(tl.float32)
    if ROUNDED:
        product = rounded(product, scale.dtype)
    put(out, row * columns + column, product, inside)


def fill(format: Float8, parts: Mapping[str, Tensor], out: Tensor) -> None:
    out = out.flatten(0, -2)
    stored = [parts["weight"].view(torch.uint8), parts["scale"]]
    launch_tiles(_float8, stored, out, format.block_of(tuple(out.shape)), ROUNDED=format.rounded)

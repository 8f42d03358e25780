"""Parts shared by the formats' kernels: rounding, unpacking codes, and tiles of a weight."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = (8, 256)  # rows and columns per program


@triton.jit
def in_bfloat16(value):
    """Round float32 to the nearest bfloat16, ties to even, as float32.

    Uses integers, since triton's interpreter would truncate the lower bits.
    """
    bits = value.to(tl.uint32, bitcast=True)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return tl.where(value == value, near.to(tl.float32, bitcast=True), float("nan"))


@triton.jit
def put(out, place, value, inside):
    """Store float32 values at out + place, rounded once to the dtype that `out` points to."""
    if out.dtype.element_ty == tl.bfloat16:
        value = in_bfloat16(value)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def tile(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return a program's rows int64 [ROWS, 1] and columns [1, COLUMNS]; rows are on grid axis 0."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    return row, tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def code_at(words, stride, place, inside, BITS: tl.constexpr):
    """Return the int32 code at `place` of the stream of bits in words[0], words[stride], ..."""
    bit = place * BITS
    first = words + (bit >> 5) * stride
    offset = (bit & 31).to(tl.uint32)
    code = tl.load(first, mask=inside, other=0).to(tl.uint32, bitcast=True) >> offset
    if 32 % BITS != 0:
        goes_on = inside & (offset + BITS > 32)
        later = tl.load(first + stride, mask=goes_on, other=0).to(tl.uint32, bitcast=True)
        code |= later << ((32 - offset) & 31)
    return (code & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def rounded(product, dtype: tl.constexpr):
    """Round a float32 to the dtype of its scales, as float32."""
    if dtype == tl.float16:
        product = product.to(tl.float16).to(tl.float32)
    if dtype == tl.bfloat16:
        product = in_bfloat16(product)
    return product


@triton.jit
def scaled(difference, scale):
    return rounded(difference.to(tl.float32) * scale.to(tl.float32), scale.dtype)


def launch_tiles(
    kernel: Any, parts: Sequence[Tensor | None], out: Tensor, numbers: Sequence[int], **constants: Any
) -> None:
    """Launch a kernel over tiles of out [rows, columns], with the parts, out, its sizes and the numbers."""
    rows, columns = out.shape
    with torch.cuda.device_of(out):
        kernel[(triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1]))](
            *parts, out, rows, columns, *numbers, **constants,
            ROWS=TILE[0], COLUMNS=TILE[1], num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

"""GPU kernel: one lane per byte, which produces two adjacent values."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.triton import in_bfloat16, put

_BYTES = 1024


@triton.jit
def _codebook(
    codes, absmax, table, out, count, block_bytes,
    HALVES: tl.constexpr, BRAINS: tl.constexpr, FIRST: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BYTES
    index = start + tl.arange(0, BYTES)
    inside = index < count
    code = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
    size = tl.load(absmax + index // block_bytes, mask=inside, other=0.0)
    first, second = (code >> FIRST) & 15, (code >> (4 - FIRST)) & 15
    value = tl.interleave(tl.load(table + first) * size, tl.load(table + second) * size)
    if HALVES:
        value = value.to(tl.float16).to(tl.float32)
    if BRAINS:
        value = in_bfloat16(value)
    place = start * 2 + tl.arange(0, 2 * BYTES)
    put(out, place, value, place < 2 * count)


def fill(format: Codebook, parts: Mapping[str, Tensor], out: Tensor) -> None:
    sizes, table = format.sizes(parts), format.table(parts)
    fill_from_table(parts["codes"], sizes, table, format.block, format.dtype, out)


def fill_from_table(
    codes: Tensor,
    absmax: Tensor,
    table: Tensor,
    block: int,
    dtype: torch.dtype | None,
    out: Tensor,
    low_first: bool = False,
) -> None:
    """Fill out from absmax float32 [blocks] and table float32 [16].

    low_first: whether the first of two values is in the low half of their byte.
    """
    count = codes.numel()
    with torch.cuda.device_of(out):
        _codebook[(triton.cdiv(count, _BYTES),)](
            codes, absmax, table, out, count, block // 2,
            HALVES=dtype == torch.float16, BRAINS=dtype == torch.bfloat16, FIRST=0 if low_first else 4,
            BYTES=_BYTES, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

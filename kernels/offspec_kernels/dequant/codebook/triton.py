"""The kernel: a lane for each byte, which makes two values that lie side by side."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.triton import in_bfloat16, put

_BYTES = 1024


@triton.jit
def _codebook(
    codes, absmax, table, out, count, block_bytes,
    HALVES: tl.constexpr, BRAINS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BYTES
    index = start + tl.arange(0, BYTES)
    inside = index < count
    code = tl.load(codes + index, mask=inside, other=0).to(tl.int32)
    size = tl.load(absmax + index // block_bytes, mask=inside, other=0.0)
    value = tl.interleave(tl.load(table + (code >> 4)) * size, tl.load(table + (code & 15)) * size)
    if HALVES:
        value = value.to(tl.float16).to(tl.float32)
    if BRAINS:
        value = in_bfloat16(value)
    place = start * 2 + tl.arange(0, 2 * BYTES)
    put(out, place, value, place < 2 * count)


def fill(
    codes: Tensor, absmax: Tensor, table: Tensor, block: int, dtype: torch.dtype | None, out: Tensor
) -> None:
    """absmax float32 [blocks], table float32 [16]."""
    count = codes.numel()
    with torch.cuda.device_of(out):
        _codebook[(triton.cdiv(count, _BYTES),)](
            codes,
            absmax,
            table,
            out,
            count,
            block // 2,
            HALVES=dtype == torch.float16,
            BRAINS=dtype == torch.bfloat16,
            BYTES=_BYTES,
            num_warps=4,
            enable_fp_fusion=False,
        )

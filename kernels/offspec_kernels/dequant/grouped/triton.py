"""GPU kernel: a program for some groups, one value per lane."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.grouped import Grouped
from offspec_kernels.dequant.triton import put

_GROUPS = 16


@triton.jit
def _grouped(codes, step, offset, out, groups, BITS: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)[:, None]  # [GROUPS, 1]
    inside = group < groups
    lane = tl.arange(0, 64)[None, :]  # [1, 64]
    start = codes + group * (8 * BITS)
    plane_bits: tl.constexpr = 2 if BITS == 3 else BITS
    size: tl.constexpr = 8 * plane_bits  # bytes, and codes per plane
    code = tl.load(start + lane % size, mask=inside, other=0).to(tl.int32)
    code = (code >> (lane // size * plane_bits)) & ((1 << plane_bits) - 1)
    if BITS == 3:
        high = tl.load(start + 16 + lane % 8, mask=inside, other=0).to(tl.int32)
        code = code | (((high >> (lane // 8)) & 1) << 2)
    s = tl.load(step + group, mask=inside, other=0.0).to(tl.float32)
    o = tl.load(offset + group, mask=inside, other=0.0).to(tl.float32)
    put(out, group * 64 + lane, code.to(tl.float32) * s + o, inside)


def fill(format: Grouped, parts: Mapping[str, Tensor], out: Tensor) -> None:
    groups = parts["step"].numel()
    with torch.cuda.device_of(out):
        _grouped[(triton.cdiv(groups, _GROUPS),)](
            parts["codes"], parts["step"], parts["offset"], out, groups,
            BITS=format.bits, GROUPS=_GROUPS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

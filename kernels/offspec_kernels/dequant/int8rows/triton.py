"""GPU kernel: a program for some columns of a row."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.dequant.int8rows import STEP, Int8Rows
from offspec_kernels.dequant.triton import put

_COLUMNS = 1024


@triton.jit
def _int8_rows(codes, scale, out, columns, step, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    place = row * columns + column
    code = tl.load(codes + place, mask=inside, other=0).to(tl.float32)
    put(out, place, code * tl.load(scale + row) * step, inside)


def fill(format: Int8Rows, parts: Mapping[str, Tensor], out: Tensor) -> None:
    codes, scale = parts["codes"], parts["scale"]
    rows, columns = codes.shape
    with torch.cuda.device_of(out):
        _int8_rows[(rows, triton.cdiv(columns, _COLUMNS))](
            codes, scale, out, columns, STEP, COLUMNS=_COLUMNS, num_warps=4, enable_fp_fusion=False
        )

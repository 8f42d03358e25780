"""A prototype: a product that unpacks NF4 inside its tile, so that bfloat16 weights never reach the memory.

Compared with unpacking and `row_linear` by `products`; nothing else uses it.

Letters: T rows, K columns, N rows of the weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.backend import interprets

_WIDTH = 64


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _nf4_product(  # type: ignore[no-untyped-def]
    rows, codes, absmax, table, out, count, width, columns, row_stride,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One tile [ROWS, WIDTH] of out [T, N]; even and odd columns are multiplied apart, as codes hold them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    half = tl.arange(0, BLOCK // 2)
    total = tl.zeros([ROWS, WIDTH], tl.float32)
    high, wide = (row < count)[:, None], (place < width)[None, :]
    for block in range(0, columns // BLOCK):
        at = rows + row[:, None] * row_stride + (block * BLOCK + 2 * half)[None, :]
        even = tl.load(at, mask=high, other=0.0)  # [ROWS, BLOCK / 2]
        odd = tl.load(at + 1, mask=high, other=0.0)
        byte = place[None, :] * (columns // 2) + (block * (BLOCK // 2) + half)[:, None]
        code = tl.load(codes + byte, mask=wide, other=0).to(tl.int32)  # [BLOCK / 2, WIDTH]
        scale = tl.load(absmax + place * (columns // BLOCK) + block, mask=place < width, other=0.0)[None, :]
        first = (tl.load(table + (code >> 4)) * scale).to(tl.bfloat16)
        second = (tl.load(table + (code & 15)) * scale).to(tl.bfloat16)
        if INTERPRETED:  # numpy knows no bfloat16
            total += tl.sum(even.to(tl.float32)[:, :, None] * first.to(tl.float32)[None, :, :], 1)
            total += tl.sum(odd.to(tl.float32)[:, :, None] * second.to(tl.float32)[None, :, :], 1)
        else:
            total = tl.dot(even, first, total)
            total = tl.dot(odd, second, total)
    tl.store(out + row[:, None] * width + place[None, :], total.to(out.dtype.element_ty), mask=high & wide)


def nf4_product(
    rows: Tensor, parts: dict[str, Tensor], width: int, *, tile: int = 64, block: int = 64
) -> Tensor:
    """rows [T, K] bfloat16 times a weight [N, K] in NF4; `width` is N, `tile` the rows of a program."""
    count, columns = rows.shape
    assert columns % block == 0
    out = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    kernel: Any = _nf4_product[(triton.cdiv(count, tile), triton.cdiv(width, _WIDTH))]
    kernel(
        rows, parts["codes"], parts["absmax"], parts["table"], out, count, width, columns, rows.stride(0),
        ROWS=tile, WIDTH=_WIDTH, BLOCK=block, INTERPRETED=interprets(), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out

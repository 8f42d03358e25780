"""The noise of `formula` inside a kernel, with the same operations and therefore the same bits.

A kernel that calls these functions must be launched with `enable_fp_fusion=False`: a product fused with a sum
is rounded once instead of twice, which would change the last bit of the noise. Launchers pass the halves of
the seed as integers; the kernel lists both in `do_not_specialize`, so that a seed of 1 is not compiled in.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from offspec_kernels.noise import formula

_BLOCK = 1024  # tokens per program

_MULTIPLIER_0 = tl.constexpr(formula.MULTIPLIERS[0])
_MULTIPLIER_1 = tl.constexpr(formula.MULTIPLIERS[1])
_WEYL_0 = tl.constexpr(formula.WEYL[0])
_WEYL_1 = tl.constexpr(formula.WEYL[1])
_ROUNDS = tl.constexpr(formula.ROUNDS)
_PURPOSE = tl.constexpr(formula.PURPOSE)
_LN2 = tl.constexpr(formula.LN2)
_SQRT_HALF = tl.constexpr(formula.SQRT_HALF)
_MANTISSA = tl.constexpr(formula.MANTISSA)
_TERMS = tl.constexpr(formula.TERMS)
_HALF_BELOW = tl.constexpr(2**32 - 0.5)
_STEP = tl.constexpr(2.0**-32)


@triton.jit
def philox_words(block, position, key_low, key_high):
    """Return the four uint32 words of blocks (int ids below 2^32, any shape) at a scalar int64 position."""
    c0 = block.to(tl.uint32)
    c1 = tl.cast(position, tl.uint32)
    c2 = tl.cast(position >> 32, tl.uint32)
    c3 = tl.full((), _PURPOSE, tl.uint32)
    k0, k1 = tl.cast(key_low, tl.uint32), tl.cast(key_high, tl.uint32)
    for _ in tl.static_range(_ROUNDS):
        high_0, high_1 = tl.umulhi(c0, _MULTIPLIER_0), tl.umulhi(c2, _MULTIPLIER_1)
        low_0, low_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = k0 + _WEYL_0, k1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def _log(x):
    """Compute `formula._log`, operation for operation."""
    bits = x.to(tl.int64, bitcast=True)
    k = (bits - _SQRT_HALF) >> _MANTISSA
    m = (bits - (k << _MANTISSA)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = tl.zeros_like(s) + 2.0 / (2 * _TERMS - 1)
    for step in tl.static_range(_TERMS - 1):
        series = series * square + 2.0 / (2 * (_TERMS - 2 - step) + 1)
    return series * s + k.to(tl.float64) * _LN2


@triton.jit
def gumbel_of(bits):
    """Return Gumbel values, float32, of uniform uint32 bits of any shape."""
    survival = (-bits.to(tl.float64) + _HALF_BELOW) * _STEP  # 1 - w
    return (-_log(-_log(survival))).to(tl.float32)


@triton.jit
def gumbel_noise(token, position, key_low, key_high):
    """Return Gumbel values, float32, of tokens (int32 or int64 ids, any shape) at a scalar int64 position.

    Four tokens share a block, but each is computed with its own block here: for non-consecutive ids.
    """
    w0, w1, w2, w3 = philox_words(token // 4, position, key_low, key_high)
    word = token % 4
    bits = tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))
    return gumbel_of(bits)


@triton.jit
def gumbel_run(block, position, key_low, key_high):
    """Return Gumbel values [4 n], float32, of all tokens of `block` [n], int ids, at one int64 position."""
    w0, w1, w2, w3 = philox_words(block, position, key_low, key_high)
    return gumbel_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit(do_not_specialize=["first", "slots", "key_low", "key_high"])
def _fill(table, first, slots, size, key_low, key_high, BLOCK: tl.constexpr):
    """Fill a block of the row of one position."""
    position = tl.cast(first, tl.int64) + tl.program_id(1)
    run = tl.program_id(0) * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = gumbel_run(run, position, key_low, key_high)
    tl.store(table + (position % slots) * size + token, values, mask=token < size)


def fill_rows(table: Tensor, seed: int, first: int, count: int) -> None:
    """Generate noise of `count` positions from `first` on; position p fills row p % S of table [S, V]
    float32.

    The bits equal `gumbel_row`'s. No two of the positions may share a row.
    """
    slots, size = table.shape
    assert 0 < count <= slots and table.is_contiguous()
    with torch.cuda.device_of(table):
        _fill[(triton.cdiv(size, _BLOCK), count)](
            table, first, slots, size, seed & formula.LOW, seed >> 32, BLOCK=_BLOCK,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip

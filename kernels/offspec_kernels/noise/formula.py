"""Gumbel noise from a counter: the generator and the formula, in torch.

The generator is counter-based (Philox-4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), so a value depends only on its seed, position and token. Everything is integer
arithmetic or one IEEE operation at a time, so values are equal on every device and, bit for bit, in kernels
(`noise.triton`) and compiled loops (`noise.native`).

Token t of a position uses word t % 4 of the block with counter (t // 4, position low, position high, PURPOSE)
under the key (seed low, seed high).
"""

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key in each round
ROUNDS = 10

# The last counter word. Another use of the same seed (such as an acceptance test) uses another constant,
# which makes its numbers independent of these.
PURPOSE = 0x47756D62

LN2 = 0.6931471805599453
SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of float64 sqrt(1/2), as an integer
MANTISSA = 52  # mantissa bits of a float64
TERMS = 10  # terms of the logarithm's series
ATANH = [2.0 / (2 * i + 1) for i in range(TERMS)]  # 2 atanh(s) / s, a polynomial in s^2

# On a CPU a row is generated in pieces of this many blocks: they stay in a core's cache, and are too short
# for torch to split among threads, which on a busy machine takes far longer than the work itself.
_PIECE = 4096


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Compute Philox-4x32-10 of four counter words under a 64-bit key (Salmon et al. 2011).

    Args:
        counter: Four int64 tensors that broadcast together, each value in [0, 2^32).
        key: Two words in [0, 2^32).

    Returns:
        Four int64 tensors with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two 32-bit words fills an int64, sign bit included: it wraps, but its 64 bits are
        # correct. The high word needs a shift, which smears the sign, and a mask. c1 and c3 keep the dirty
        # upper half of their products, and the key its carries, since only an xor and that mask follow.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & LOW
        c2 = ((p0 >> 32) ^ c3 ^ k1) & LOW
        c1, c3 = p1, p0
        k0, k1 = k0 + WEYL[0], k1 + WEYL[1]
    return c0, c1 & LOW, c2, c3 & LOW


def uniform_bits(seed: int, position: int, blocks: Tensor) -> Tensor:
    """Return the words of some blocks at one position: blocks [n] int64 -> [4 n] int64 in [0, 2^32).

    Block b contains the words of tokens 4 b to 4 b + 3.
    """
    assert 0 <= seed < 2**64 and 0 <= position < 2**63
    low, high, purpose = (
        torch.tensor(word, device=blocks.device) for word in (position & LOW, position >> 32, PURPOSE)
    )
    return torch.stack(philox((blocks, low, high, purpose), (seed & LOW, seed >> 32)), dim=-1).flatten()


def gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32, from uniform int64 bits in [0, 2^32) of any shape.

    g = -log(-log1p(-w)) with w = (bits + 1/2) / 2^32, which lies strictly inside (0, 1). It is computed in
    float64, because both tails need it: the right tail (w near 0, the winning tokens) is the log of a number
    near 1, and the left tail (w near 1) needs 1 - w; float32 can represent neither and would produce
    infinities. In float64 w and 1 - w are both exact, so log1p(-w) equals log(1 - w).
    Values range from -3.13 (bits = 2^32 - 1) to 22.87 (bits = 0).
    """
    survival = bits.to(torch.float64).neg_().add_(2**32 - 0.5).mul_(2.0**-32)  # 1 - w
    return _log(_log(survival).neg_()).neg_().to(torch.float32)


def torch_row(seed: int, position: int, size: int, device: torch.device) -> Tensor:
    """Return noise of tokens 0 to size - 1 at one position, [size] float32, with torch, on any device.

    Args:
        seed: In [0, 2^64).
        position: Absolute position of the token.
        size: Vocabulary size.
        device: Device of the row.
    """
    blocks = torch.arange((size + 3) // 4, device=device)
    pieces = blocks.split(_PIECE) if device.type == "cpu" else (blocks,)
    return torch.cat([gumbel(uniform_bits(seed, position, piece)) for piece in pieces])[:size]


def _log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive, normal float64, to about an ulp.

    torch.log differs by an ulp between devices and vector widths. Sums, products and quotients round equally
    everywhere unless two of them are fused, so this function uses only these operations.
    """
    # x = 2^k m with m in [sqrt(1/2), sqrt(2)), so that k = 0 around 1 and nothing cancels there.
    bits = x.view(torch.int64)
    k = (bits - SQRT_HALF).bitwise_right_shift_(MANTISSA)
    m = (bits - (k << MANTISSA)).view(torch.float64)
    s = (m - 1.0).div_(m.add_(1.0))  # log m = 2 atanh(s), |s| < 0.172
    square = s * s
    series = torch.full_like(s, ATANH[-1])
    for coefficient in reversed(ATANH[:-1]):
        series.mul_(square).add_(coefficient)
    return series.mul_(s).add_(k.to(torch.float64).mul_(LN2))

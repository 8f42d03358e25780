"""Gumbel noise that any node, draft or device can look up: g(seed, position, token).

The generator is counter-based (Philox-4x32-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers:
as easy as 1, 2, 3", SC 2011), so a value depends on its seed, position and token and on nothing else: not
on the rows that were asked for before it, nor on the shape of a tree. Adding it to log-probabilities and
taking the argmax samples from them (the Gumbel-max trick); looking up the same noise for draft and target
couples the two (Daliri et al. 2024, arXiv 2408.07978).

Everything is integer arithmetic or one IEEE operation at a time, so rows are equal on every device.

Letters: n positions, V vocabulary, B = ceil(V / 4) blocks of four words.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # what each round adds to the key
_ROUNDS = 10

# The last counter word. Another use of the same seed (an acceptance test, say) takes another constant, and
# its numbers are then independent of these.
_PURPOSE = 0x47756D62

_LN2 = 0.6931471805599453
_SQRT_HALF = 0x3FE6A09E667F3BCD  # the bits of float64 sqrt(1/2), as an integer
_MANTISSA = 52  # its bits in a float64
_ATANH = [2.0 / (2 * i + 1) for i in range(10)]  # 2 atanh(s) / s, a polynomial in s^2

_CACHED_ROWS = 64

# On a CPU a row is made in pieces of this many blocks: they stay in a core's cache, and are too short for
# torch to split among threads, which on a busy machine takes far longer than the work.
_PIECE = 4096


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox-4x32-10 of four counter words under a 64-bit key.

    counter: four int64 tensors that broadcast together, each value in [0, 2^32). key: two words in
    [0, 2^32). Returns four int64 tensors with values in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two 32-bit words fills an int64, sign bit included: it wraps, but its 64 bits are
        # right. The high word is a shift, which smears the sign, and a mask. c1 and c3 keep the unclean
        # upper half of their products, and the key its carries, since all they meet is an xor and that mask.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _LOW
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _LOW
        c1, c3 = p1, p0
        k0, k1 = k0 + _WEYL[0], k1 + _WEYL[1]
    return c0, c1 & _LOW, c2, c3 & _LOW


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise, float32, from uniform int64 bits in [0, 2^32) of any shape.

    g = -log(-log1p(-w)) with w = (bits + 1/2) / 2^32, which lies strictly inside (0, 1). It is worked out
    in float64, because both tails need it: the right one (w near 0, the tokens that win) is log of a
    number next to 1, and the left one (w near 1) needs 1 - w; float32 holds neither, and would turn
    values into infinities. In float64 w and 1 - w are both exact, so log1p(-w) is just log(1 - w).
    From -3.13 (bits = 2^32 - 1) to 22.87 (bits = 0).
    """
    survival = bits.to(torch.float64).neg_().add_(2**32 - 0.5).mul_(2.0**-32)  # 1 - w
    return _log(_log(survival).neg_()).neg_().to(torch.float32)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64, to about an ulp.

    torch.log differs by an ulp between devices and between vector widths. Sums, products and quotients are
    rounded alike everywhere, as long as nothing fuses two of them, so this is written in those alone.
    """
    # x = 2^k m with m in [sqrt(1/2), sqrt(2)), so that k = 0 around 1 and nothing cancels there.
    bits = x.view(torch.int64)
    k = (bits - _SQRT_HALF).bitwise_right_shift_(_MANTISSA)
    m = (bits - (k << _MANTISSA)).view(torch.float64)
    s = (m - 1.0).div_(m.add_(1.0))  # log m = 2 atanh(s), |s| < 0.172
    square = s * s
    series = torch.full_like(s, _ATANH[-1])
    for coefficient in reversed(_ATANH[:-1]):
        series.mul_(square).add_(coefficient)
    return series.mul_(s).add_(k.to(torch.float64).mul_(_LN2))


class GumbelNoise:
    """Rows of Gumbel noise for one seed, the latest of them kept.

    Not for use by two threads at once. `cache_bytes` is the most that the kept rows can take.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        assert 0 <= seed < 2**64 and vocab_size > 0
        self.seed = seed
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._key = (seed & _LOW, seed >> 32)
        blocks = torch.arange((vocab_size + 3) // 4, device=self.device)  # [B]
        self._pieces = blocks.split(_PIECE) if self.device.type == "cpu" else (blocks,)
        self._rows: OrderedDict[int, Tensor] = OrderedDict()

    @property
    def cache_bytes(self) -> int:
        return _CACHED_ROWS * 4 * self.vocab_size

    def row(self, position: int) -> Tensor:
        """Noise of an absolute position, [V] float32. Shared: do not write to it."""
        row = self._rows.get(position)
        if row is None:
            made = torch.cat([gumbel(bits) for bits in self._bits(position)])
            row = self._rows[position] = made[: self.vocab_size]
            if len(self._rows) > _CACHED_ROWS:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(position)
        return row

    def rows(self, positions: Sequence[int]) -> Tensor:
        """Noise of several absolute positions, [n, V] float32, the caller's own."""
        if not positions:
            return torch.empty(0, self.vocab_size, device=self.device)
        return torch.stack([self.row(position) for position in positions])

    def add_to(self, scores: Tensor, positions: Sequence[int]) -> None:
        """Add to each row of scores [n, V] float32, in place, the noise of its absolute position."""
        if len(set(positions)) == 1:
            scores += self.row(positions[0])
            return
        for row, position in zip(scores, positions, strict=True):
            row += self.row(position)

    def bits(self, position: int) -> Tensor:
        """The uniform bits behind `row(position)`, [V] int64 in [0, 2^32), for checking kernels.

        Token t has word t % 4 of the block with counter (t // 4, position low, position high, purpose).
        """
        return torch.cat(list(self._bits(position)))[: self.vocab_size]

    def _bits(self, position: int) -> Iterator[Tensor]:
        assert position >= 0
        low, high, purpose = (
            torch.tensor(word, device=self.device) for word in (position & _LOW, position >> 32, _PURPOSE)
        )
        for blocks in self._pieces:
            yield torch.stack(philox((blocks, low, high, purpose), self._key), dim=-1).flatten()

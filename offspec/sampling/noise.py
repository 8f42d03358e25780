"""Randomness of a request: Gumbel noise by position and token, and uniform numbers by purpose.

The noise is g(key, position, token), for whole rows (`GumbelNoise`) or a few tokens (`gumbel_at`). A value
depends only on these three, not on earlier lookups or the shape of a tree (see `offspec_kernels.noise`).
Adding the noise to log-probabilities and taking the argmax samples from them (the Gumbel-max trick). Using
the same noise for draft and target couples the two (Daliri et al. 2024, arXiv 2408.07978).

The uniform numbers are for draws and tests that must be independent of that noise. A number depends on its
key, purpose, place and index there. The numbers come from another generator of the same family
(Philox-4x64-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A request's key is derived from its seed and its prompt (`request_key`). If it depended on the seed alone, a
sampled text that is part of a later prompt would get the same noise again and would be repeated.

Letters: n positions, V vocabulary, B = ceil(V / 4) blocks of four words.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec_kernels.backend import choose_backend
from offspec_kernels.noise import LOW, MULTIPLIERS, PURPOSE, ROUNDS, WEYL, gumbel_row

Purpose = Literal["draw", "test"]

CACHED_ROWS = 64
_NOWHERE = -1  # no position

_KEYS: dict[Purpose, int] = {"draw": 0x44726177, "test": 0x54657374}
_UNUSED = 12  # low bits of a word: 52 bits plus a half still fit in a float64
_STEP = 2.0**-52

_WORD = np.uint64(32)
_LOW = np.uint64(LOW)
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)[:, None]
_STEPS = np.outer(np.arange(ROUNDS), WEYL).astype(np.uint64)  # increment of the key in each round


def request_key(seed: int, ids: Sequence[int]) -> int:
    """Return the random key of a request: a hash in [0, 2^64) of its seed and its prompt's token ids."""
    hashed = blake2b(seed.to_bytes(8, "little"), digest_size=8)
    hashed.update(np.asarray(ids, dtype="<i8").tobytes())
    return int.from_bytes(hashed.digest(), "little")


class GumbelNoise:
    """Rows of Gumbel noise for one key, with a cache of the latest CACHED_ROWS. Not thread-safe."""

    def __init__(self, key: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        assert 0 <= key < 2**64 and vocab_size > 0
        self.key = key
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows: OrderedDict[int, Tensor] = OrderedDict()
        self._table: Tensor | None = None
        self._held = [_NOWHERE] * CACHED_ROWS  # position of each row of the table

    def row(self, position: int) -> Tensor:
        """Return the noise of an absolute position, [V] float32. Shared: do not write to it."""
        row = self._rows.get(position)
        if row is None:
            row = gumbel_row(self.key, position, self.vocab_size, self.device)
            self._rows[position] = row
            if len(self._rows) > CACHED_ROWS:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(position)
        return row

    def table(self, positions: Sequence[int]) -> Tensor | None:
        """Return a table [S, V] float32 for device kernels: row p mod S is the noise of p in `positions`.

        None on devices without such kernels. The table is valid until the next call, and for work that was
        queued before.
        """
        if self.device.type == "cpu" or choose_backend(self.device) != "triton" or not positions:
            return None
        from offspec_kernels.noise.triton import fill_rows

        if self._table is None or max(positions) - min(positions) >= len(self._held):
            while max(positions) - min(positions) >= len(self._held):
                self._held *= 2
            self._held = [_NOWHERE] * len(self._held)
            self._table = torch.empty(len(self._held), self.vocab_size, device=self.device)
        slots = len(self._held)
        fresh = sorted(position for position in {*positions} if self._held[position % slots] != position)
        for position in fresh:
            self._held[position % slots] = position
        while fresh:
            count = next((i for i in range(1, len(fresh)) if fresh[i] != fresh[0] + i), len(fresh))
            fill_rows(self._table, self.key, fresh[0], count)
            fresh = fresh[count:]
        return self._table


def uniforms(key: int, purpose: Purpose, place: int, count: int) -> torch.Tensor:
    """Return the first `count` numbers of a place, [n] float64, strictly between 0 and 1."""
    words = torch.from_numpy(_generator(key, purpose, place).random_raw(count).view(np.int64))
    # The shift extends the sign into the upper bits, which the mask clears.
    return (words >> _UNUSED).bitwise_and_(2**52 - 1).double().add_(0.5).mul_(_STEP)


def uniform_stream(key: int, purpose: Purpose, place: int) -> Iterator[float]:
    """Yield the numbers of `uniforms` without end."""
    generator = _generator(key, purpose, place)
    while True:
        yield ((int(generator.random_raw()) >> _UNUSED) + 0.5) * _STEP


def _generator(key: int, purpose: Purpose, place: int) -> np.random.Philox:
    assert 0 <= key < 2**64 and 0 <= place < 2**64
    # The lowest word of the counter is incremented for each number.
    return np.random.Philox(key=key | _KEYS[purpose] << 64, counter=place << 64)


def gumbel_at(key: int, positions: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the noise of n tokens at n absolute positions, [n] float32: `GumbelNoise.row(position)[token]`.

    The bits are identical: numpy's logarithm differs by at most one ulp of float64, which disappears when the
    value is rounded to float32.
    """
    token = np.array(tokens, dtype=np.uint64)  # [n]
    position = np.array(positions, dtype=np.uint64)
    words = _philox(token >> np.uint64(2), position, key)  # [4, n]
    bits = words[token & np.uint64(3), np.arange(len(token))]
    survival = (2**32 - 0.5 - bits.astype(np.float64)) * 2.0**-32
    result: NDArray[np.float32] = (-np.log(-np.log(survival))).astype(np.float32)
    return result


def log_prob_given_noise(
    probability: NDArray[np.float64], noise: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return the log-probability that the target picks tokens, given their probability and noise, [n].

    With noise g_t, the target picks the token with the largest p_t exp(g_t). The maximum over all other
    tokens is distributed like a single token of probability 1 - p whose noise G is independent of g, so the
    probability is P(G < g + log p - log(1 - p)) = exp(-exp(-g) (1 - p) / p).
    """
    odds = (1.0 - probability) / probability
    result: NDArray[np.float64] = -odds * np.exp(-noise.astype(np.float64))
    return result


def _philox(block: NDArray[np.uint64], position: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return the four words of n counters (block, position low, position high, PURPOSE), [4, n].

    As in `offspec_kernels.noise.philox`, but processing the words in two pairs.
    """
    even = np.stack([block, position >> _WORD])  # words 0 and 2, which are multiplied
    odd = np.stack([position & _LOW, np.full_like(position, PURPOSE)])  # words 1 and 3
    keys = np.array([key & LOW, key >> 32], dtype=np.uint64) + _STEPS & _LOW  # [rounds, 2]
    for round_key in keys[:, :, None]:
        product = (even * _MULTIPLIERS)[::-1]
        even = (product >> _WORD) ^ odd ^ round_key
        odd = product & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])

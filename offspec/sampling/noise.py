"""Gumbel noise that any node, draft or device can look up: g(key, position, token).

A value depends on its key, position and token and on nothing else: not on the rows that were asked for
before it, nor on the shape of a tree (`offspec_kernels.noise` says how). Adding it to log-probabilities and
taking the argmax samples from them (the Gumbel-max trick); looking up the same noise for draft and target
couples the two (Daliri et al. 2024, arXiv 2408.07978).

A request's key is made of its seed and of its prompt (`request_key`). With the seed alone, text that was
sampled under it and stands in a later prompt would meet the same noise a second time, and be said again.

Letters: n positions, V vocabulary, B = ceil(V / 4) blocks of four words.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.noise import gumbel_row, uniform_bits

_CACHED_ROWS = 64


def request_key(seed: int, ids: Sequence[int]) -> int:
    """The key of all randomness in a request: a hash in [0, 2^64) of its seed and its prompt's token ids."""
    hashed = blake2b(seed.to_bytes(8, "little"), digest_size=8)
    hashed.update(np.asarray(ids, dtype="<i8").tobytes())
    return int.from_bytes(hashed.digest(), "little")


class GumbelNoise:
    """Rows of Gumbel noise for one key, the latest of them kept.

    Not for use by two threads at once. `cache_bytes` is the most that the kept rows can take.
    """

    def __init__(self, key: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        assert 0 <= key < 2**64 and vocab_size > 0
        self.key = key
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._rows: OrderedDict[int, Tensor] = OrderedDict()

    @property
    def cache_bytes(self) -> int:
        return _CACHED_ROWS * 4 * self.vocab_size

    def row(self, position: int) -> Tensor:
        """Noise of an absolute position, [V] float32. Shared: do not write to it."""
        row = self._rows.get(position)
        if row is None:
            row = gumbel_row(self.key, position, self.vocab_size, self.device)
            self._rows[position] = row
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

    def bits(self, position: int) -> Tensor:
        """The uniform bits behind `row(position)`, [V] int64 in [0, 2^32), for checking kernels.

        `offspec_kernels.noise` says which word is a token's.
        """
        blocks = torch.arange((self.vocab_size + 3) // 4, device=self.device)  # [B]
        return uniform_bits(self.key, position, blocks)[: self.vocab_size]

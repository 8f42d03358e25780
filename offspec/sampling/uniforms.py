"""Uniform random numbers by name, for draws that the target's noise must know nothing of.

A number depends on its key, its purpose, its place and its index there, and on nothing else: the generator
is counter-based (Philox-4x64-10: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2,
3", SC 2011) under the request's key (`sampling.noise.request_key`) and the purpose, with the place in its
counter. The noise of `offspec.sampling.noise` comes from another generator of that family, Philox-4x32.
"""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

Purpose = Literal["draw", "test"]

_KEYS: dict[Purpose, int] = {"draw": 0x44726177, "test": 0x54657374}
_UNUSED = 12  # low bits of a word: 52 are left, and a half on top of them still fits a float64
_STEP = 2.0**-52


def uniforms(key: int, purpose: Purpose, place: int, count: int) -> torch.Tensor:
    """The first `count` numbers of a place, [n] float64, strictly inside (0, 1)."""
    words = torch.from_numpy(_generator(key, purpose, place).random_raw(count).view(np.int64))
    # The shift smears the sign over the upper bits, which the mask takes away.
    return (words >> _UNUSED).bitwise_and_(2**52 - 1).double().add_(0.5).mul_(_STEP)


def endless(key: int, purpose: Purpose, place: int) -> Iterator[float]:
    """The same numbers, one after the other."""
    generator = _generator(key, purpose, place)
    while True:
        yield ((int(generator.random_raw()) >> _UNUSED) + 0.5) * _STEP


def _generator(key: int, purpose: Purpose, place: int) -> np.random.Philox:
    assert 0 <= key < 2**64 and 0 <= place < 2**64
    # The lowest word of the counter goes up from number to number.
    return np.random.Philox(key=key | _KEYS[purpose] << 64, counter=place << 64)

"""What the target's own noise says of a guess.

A target that samples picks the token whose log-probability plus Gumbel noise is largest, and a guess may look
its token's noise up beforehand. The rows of `sampling.noise` are made for whole vocabularies; here the same
numbers are made for a few tokens at a time.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offspec_kernels.noise import LOW, MULTIPLIERS, PURPOSE, ROUNDS, WEYL

_WORD = np.uint64(32)
_LOW = np.uint64(LOW)
_MULTIPLIERS = np.array(MULTIPLIERS, dtype=np.uint64)[:, None]
_STEPS = np.outer(np.arange(ROUNDS), WEYL).astype(np.uint64)  # what the key has grown by in each round


def gumbel_at(key: int, positions: Sequence[int], tokens: Sequence[int]) -> NDArray[np.float32]:
    """The noise of n tokens at n absolute positions, [n] float32: `GumbelNoise.row(position)[token]`.

    The bits are the same. The logarithm is numpy's, an ulp of float64 away at most, which is lost when the
    value is rounded to float32.
    """
    token = np.array(tokens, dtype=np.uint64)  # [n]
    position = np.array(positions, dtype=np.uint64)
    words = _philox(token >> np.uint64(2), position, key)  # [4, n]
    bits = words[token & np.uint64(3), np.arange(len(token))]
    survival = (2**32 - 0.5 - bits.astype(np.float64)) * 2.0**-32
    result: NDArray[np.float32] = (-np.log(-np.log(survival))).astype(np.float32)
    return result


def given_noise(probability: NDArray[np.float64], noise: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log of the probability that the target picks tokens, from what it is beforehand and their noise, [n].

    With g_t the noise, p_t exp(g_t) is to be the largest. The largest of all other tokens is distributed as
    a single one of probability 1 - p whose noise G is independent of g, so the probability is
    P(G < g + log p - log(1 - p)) = exp(-exp(-g) (1 - p) / p).
    """
    odds = (1.0 - probability) / probability
    result: NDArray[np.float64] = -odds * np.exp(-noise.astype(np.float64))
    return result


def _philox(block: NDArray[np.uint64], position: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """The four words of n counters (block, position low, position high, PURPOSE), [4, n].

    As in `offspec_kernels.noise.philox`, with the words in two pairs that are worked on together.
    """
    even = np.stack([block, position >> _WORD])  # words 0 and 2: those that are multiplied
    odd = np.stack([position & _LOW, np.full_like(position, PURPOSE)])  # words 1 and 3
    keys = np.array([key & LOW, key >> 32], dtype=np.uint64) + _STEPS & _LOW  # [rounds, 2]
    for round_key in keys[:, :, None]:
        product = (even * _MULTIPLIERS)[::-1]
        even = (product >> _WORD) ^ odd ^ round_key
        odd = product & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])

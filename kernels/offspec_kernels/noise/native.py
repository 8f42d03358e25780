"""The noise of `formula` in a compiled loop for CPUs, with the same operations and therefore the same bits.

By default, numba neither fuses a product with a sum nor reorders operations.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import compiled, inlined
from offspec_kernels.noise import formula

_PIECE = 4096  # blocks per piece, so that their words and values stay in a core's cache between loops
_LOW, _ROUNDS, _PURPOSE = formula.LOW, formula.ROUNDS, formula.PURPOSE
_MULTIPLIER_0, _MULTIPLIER_1 = formula.MULTIPLIERS
_WEYL_0, _WEYL_1 = formula.WEYL
_SQRT_HALF, _MANTISSA, _LN2 = formula.SQRT_HALF, formula.MANTISSA, formula.LN2
_HALF_BELOW, _STEP = 2.0**32 - 0.5, 2.0**-32
_C0, _C1, _C2, _C3, _C4, _C5, _C6, _C7, _C8, _C9 = formula.ATANH


def native_row(seed: int, position: int, size: int) -> Tensor:
    """Return noise of tokens 0 to size - 1 at one position, [size] float32; see `noise.gumbel_row`."""
    row = torch.empty(size)
    _fill(row.numpy(), seed & _LOW, seed >> 32, position & _LOW, position >> 32)
    return row


@inlined
def _words(words: Any, first: int, key_low: int, key_high: int, low: int, high: int) -> None:
    """Compute the words of blocks from `first` on, four uint32 each: `formula.philox`."""
    for i in range(len(words) // 4):
        c0, c1, c2, c3 = np.uint32(first + i), np.uint32(low), np.uint32(high), np.uint32(_PURPOSE)
        k0, k1 = np.uint32(key_low), np.uint32(key_high)
        for _ in range(_ROUNDS):
            p0, p1 = np.uint64(c0) * np.uint64(_MULTIPLIER_0), np.uint64(c2) * np.uint64(_MULTIPLIER_1)
            c0 = np.uint32(np.uint32(p1 >> np.uint64(32)) ^ c1 ^ k0)
            c2 = np.uint32(np.uint32(p0 >> np.uint64(32)) ^ c3 ^ k1)
            c1, c3 = np.uint32(p1), np.uint32(p0)
            k0, k1 = np.uint32(k0 + np.uint32(_WEYL_0)), np.uint32(k1 + np.uint32(_WEYL_1))
        words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = c0, c1, c2, c3


@inlined
def _minus_log(values: Any) -> None:
    """Replace positive, normal float64 values by -log(values), as in `formula._log`."""
    bits = values.view(np.int64)
    for i in range(len(values)):
        k = (bits[i] - np.int64(_SQRT_HALF)) >> np.int64(_MANTISSA)
        bits[i] -= k << np.int64(_MANTISSA)
        s = (values[i] - 1.0) / (values[i] + 1.0)
        q = s * s
        series = (((((((((_C9 * q + _C8) * q + _C7) * q + _C6) * q + _C5) * q + _C4) * q + _C3) * q + _C2)
                   * q + _C1) * q + _C0)  # fmt: skip
        values[i] = -(series * s + np.float64(k) * _LN2)


@compiled
def _fill(out: Any, key_low: int, key_high: int, low: int, high: int) -> None:
    words, values = np.empty(4 * _PIECE, np.uint32), np.empty(4 * _PIECE, np.float64)
    for start in range(0, len(out), 4 * _PIECE):
        count = min(4 * _PIECE, len(out) - start)
        _words(words[: (count + 3) // 4 * 4], start // 4, key_low, key_high, low, high)
        for i in range(count):
            values[i] = (_HALF_BELOW - np.float64(words[i])) * _STEP  # 1 - w
        _minus_log(values[:count])
        _minus_log(values[:count])
        for i in range(count):
            out[start + i] = np.float32(values[i])

"""Gumbel noise from a counter: any value by its seed, position and token, the same on every device."""

import sys

import torch
from torch import Tensor

from offspec_kernels.noise.formula import (
    LOW,
    MULTIPLIERS,
    PURPOSE,
    ROUNDS,
    WEYL,
    gumbel,
    philox,
    torch_row,
    uniform_bits,
)


def gumbel_row(seed: int, position: int, size: int, device: torch.device) -> Tensor:
    """Noise of tokens 0 to size - 1 at one position, [size] float32.

    On a CPU a compiled loop makes it in a thirtieth of the time that torch's operations take, where numba is
    loaded anyway, as it is beside packed weights: for this alone its 130 MB would be too much.

    Args:
        seed: In [0, 2^64).
        position: Absolute position of the token.
        size: Vocabulary size.
        device: Where the row is made.

    Scratch: compiled, 0.2 MB; eager on a CPU, 1 MB, on another device some 10 rows of float64.
    """
    if device.type == "cpu" and "numba" in sys.modules:
        from offspec_kernels.noise.native import native_row

        return native_row(seed, position, size)
    return torch_row(seed, position, size, device)


__all__ = [
    "LOW",
    "MULTIPLIERS",
    "PURPOSE",
    "ROUNDS",
    "WEYL",
    "gumbel",
    "gumbel_row",
    "philox",
    "torch_row",
    "uniform_bits",
]

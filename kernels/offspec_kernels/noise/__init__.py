"""Gumbel noise from a counter: each value follows from its seed, position and token, on every device."""

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
    """Return noise of tokens 0 to size - 1 at one position, [size] float32.

    On a CPU a compiled loop takes a thirtieth of the time of torch's operations. It is used only if numba is
    already loaded, as it is with quantized weights: loading its 130 MB for this alone would be too much.

    Args:
        seed: In [0, 2^64).
        position: Absolute position of the token.
        size: Vocabulary size.
        device: Device of the row.

    Workspace: compiled, 0.2 MB; eager on a CPU, 1 MB, on another device about 10 rows of float64.
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

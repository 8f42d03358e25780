"""The convolution in a compiled loop, for CPUs: row by row, tap by tap, in the same order for any rows.

Letters: T rows, C channels, K taps, R rows of inputs.
"""

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import Array, array, compiled, fused, widen
from offspec_kernels.dequant.threads import parallel_for


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows, channels = len(window), inputs.shape[1]
    out = torch.empty(rows, channels)
    given = array(inputs.contiguous()).reshape(inputs.shape)
    taps = weight.float().T.contiguous().numpy()
    first = np.zeros(channels, np.float32) if bias is None else bias.float().contiguous().numpy()
    is_half = inputs.dtype == torch.float16

    def work(start: int, end: int) -> None:
        _convolve(given, is_half, window.numpy(), taps, first, out.numpy(), start, end)

    parallel_for(work, rows, rows * channels)
    return out


@compiled
def _convolve(
    inputs: Array, is_half: bool, window: Array, weight: Array, bias: Array, out: Array, start: int, end: int
) -> None:
    """Compute rows [start, end) of out [T, C]; weight [K, C], bias [C]."""
    wide = np.empty(len(bias), np.float32)
    for row in range(start, end):
        now = out[row]
        now[:] = bias
        for tap in range(len(weight)):
            widen(inputs[window[row, tap]], is_half, wide)
            _add(now, weight[tap], wide)


@fused
def _add(total: Array, weight: Array, values: Array) -> None:
    for c in range(len(total)):
        total[c] = total[c] + weight[c] * values[c]

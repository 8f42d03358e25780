"""Values from 4-bit codes that lie as torch's own product of such weights wants them, on wide registers.

That product makes the values again for every few rows, and loses to an ordinary one where there are many.
Codes of 64 outputs lie together: for each input 32 bytes, of which byte j has the code of output j in its low
half and that of output j + 32 in its high half.

Letters: N outputs, K inputs, 64 weights of a group.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import array, compiled, put
from offspec_kernels.dequant.threads import spread

TILE = 64


@compiled
def _fill(
    codes: Any, scales: Any, out: Any, outputs: int, first: int, inputs: int, width: int, start: int, end: int
) -> None:
    step, middle = np.empty(64, np.float32), np.empty(64, np.float32)
    for group in range(start, end):  # not tile by tile: that touches a page for every input
        for tile in range(width // 64):
            at = (group * outputs + first + tile * 64) * 2
            pairs = scales[at : at + 128]
            for j in range(64):
                step[j], middle[j] = pairs[2 * j], pairs[2 * j + 1]
            for k in range(group * 64, group * 64 + 64):
                at = ((first // 64 + tile) * inputs + k) * 32
                bytes_ = codes[at : at + 32]
                at = k * width + tile * 64
                values = out[at : at + 64]
                for j in range(32):
                    low, high = np.int32(bytes_[j] & 15) - 8, np.int32(bytes_[j] >> 4) - 8
                    put(values, j, np.float32(low) * step[j] + middle[j])
                    put(values, j + 32, np.float32(high) * step[j + 32] + middle[j + 32])


def fill(codes: Tensor, scales: Tensor, first: int, out: Tensor) -> None:
    """Write the values of some outputs of a matrix, transposed.

    Args:
        codes: Of the whole matrix, as `_convert_weight_to_int4pack_for_cpu` gives them where `has_tiles`.
        scales: [K / 64, N, 2] float32: of each group a step, and the value of code 8.
        first: The first output, a multiple of 64.
        out: [K, outputs] float32 or bfloat16, contiguous, with a multiple of 64 outputs.
    """
    (inputs, width), outputs = out.shape, scales.shape[1]
    flat, pairs, values = array(codes), array(scales), array(out)
    spread(
        lambda start, end: _fill(flat, pairs, values, outputs, first, inputs, width, start, end),
        inputs // 64,
        out.numel(),
    )


@cache
def has_tiles() -> bool:
    """Whether this torch lays codes out as described here, on this processor."""
    codes = torch.arange(128 * 64, dtype=torch.int32).view(128, 64).mul(7).remainder(17).remainder(16)
    scales = torch.tensor([1.0, 8.0]).expand(1, 128, 2).contiguous()
    out = torch.empty(64, 64)
    try:
        fill(torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2), scales, 64, out)
    except (AttributeError, RuntimeError, NotImplementedError, TypeError):
        return False
    return torch.equal(out.T, codes[64:].float())

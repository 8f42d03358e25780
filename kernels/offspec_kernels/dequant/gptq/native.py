"""The compiled loop for the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from offspec_kernels.dequant.native import array, compiled
from offspec_kernels.dequant.scaled.native import BLOCK, rounding, scaled_columns, unpack_across, unpacked
from offspec_kernels.dequant.threads import spread

if TYPE_CHECKING:
    from offspec_kernels.dequant.gptq.layout import GptqLayout

_ROWS = 32  # whose codes, whatever their bits, fill words


@compiled
def _fill(
    words: Any, zeros: Any, scales: Any, index: Any, bits: int, columns: int, kind: int, out: Any, start: int,
    end: int,
) -> None:  # fmt: skip
    """start, end: which blocks of columns, those of all `_ROWS` rows in a row."""
    codes = np.empty(BLOCK, np.uint8)
    blocks = (columns + BLOCK - 1) // BLOCK
    for block in range(start, end):
        first = block % blocks * BLOCK
        size = min(BLOCK, columns - first)
        for row in range(block // blocks * _ROWS, min((block // blocks + 1) * _ROWS, len(index))):
            bit = row * bits
            place = (bit >> 5) * columns + first
            later = words[place + columns : place + columns + size]  # empty behind the last word
            unpack_across(words[place : place + size], later, bits, bit & 31, codes)
            place = index[row] * columns + first
            zero, scale = zeros[place : place + size], scales[place : place + size]
            place = row * columns + first
            scaled_columns(codes, zero, scale, kind, out[place : place + size])


def fill(format: GptqLayout, parts: Mapping[str, Tensor], out: Tensor) -> None:
    """out: [in, out]; the groups in g_idx are those that there are."""
    rows, columns = out.shape
    bits, scales = format.bits, parts["scales"].float()
    zeros = torch.empty(scales.numel(), dtype=torch.uint8)
    unpacked(array(format.zero_words(parts["qzeros"])), bits, format.later_plus_one, array(zeros))
    kind = rounding(scales, format.scales, (1 << bits) - 1, out.dtype)
    words, zero, scale, values = (array(each) for each in (parts["qweight"], zeros, scales, out))
    index = array(format.index(parts, rows))
    blocks = -(-rows // _ROWS) * -(-columns // BLOCK)
    spread(
        lambda start, end: _fill(words, zero, scale, index, bits, columns, kind, values, start, end),
        blocks,
        out.numel(),
    )

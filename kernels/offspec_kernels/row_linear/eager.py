"""Blocks where the processor has them, or torch's own product."""

import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.row_linear import blocks


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if blocks.has_blocks(rows, weight):
        out = blocks.row_linear(rows, weight)
    else:  # with a matrix unit oneDNN reads beyond the odd end of a row, and NaN there becomes its own
        out = F.linear(rows.contiguous(), weight)
    return out if bias is None else out + bias

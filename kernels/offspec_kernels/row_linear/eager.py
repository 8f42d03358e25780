"""Blocks where torch's own product does not do, or that."""

import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.row_linear import blocks


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if blocks.has_blocks(rows, weight) and blocks.replaces_torch():
        out = blocks.row_linear(rows, weight)
    else:  # with a matrix unit oneDNN reads beyond the odd end of a row, and NaN there becomes its own
        out = F.linear(rows.contiguous(), weight)
    return out if bias is None else out + bias

"""Blocks where the processor has them, or torch's own product."""

import torch.nn.functional as F
from torch import Tensor

from offspec_kernels.row_linear import blocks


def row_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = blocks.row_linear(rows, weight) if blocks.has_blocks(rows, weight) else F.linear(rows, weight)
    return out if bias is None else out + bias

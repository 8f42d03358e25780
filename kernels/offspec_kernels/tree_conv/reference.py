"""The convolution in one expression, in float64."""

import torch
from torch import Tensor


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = torch.einsum("tkc,ck->tc", inputs.double()[window], weight.double())
    return (out if bias is None else out + bias.double()).float()

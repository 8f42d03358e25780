"""The convolution tap by tap: each number is multiplied and added by itself, which no shape changes."""

from torch import Tensor


def tree_conv(inputs: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide = weight.float().T.contiguous()  # [K, C]
    out = inputs[window[:, 0]].float().mul_(wide[0])
    for tap in range(1, len(wide)):
        out += inputs[window[:, tap]].float().mul_(wide[tap])
    return out if bias is None else out.add_(bias.float())

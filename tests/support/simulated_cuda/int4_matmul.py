"""torch's product with 4-bit weights, as on a CUDA device; CPUs lack it under these names.

Letters: T rows, N outputs, K inputs, G weights of a group.
"""

import torch
from torch import Tensor

_MIDDLE = 8


def arrange(codes: Tensor, tiles: int) -> Tensor:
    """Pack codes in pairs, uint8 [N, K / 2], the first in the high half, in the shape used by a device.

    The bytes keep their order, which differs from a device's: only `multiply` may read them.
    """
    assert codes.dtype == torch.uint8, "a device packs them in pairs"
    rows, inputs = codes.shape[0], 2 * codes.shape[1]
    return (
        codes.contiguous().view(torch.int32).view(rows // 8, inputs // (16 * tiles), 32, tiles // 2).clone()
    )


def multiply(x: Tensor, codes: Tensor, group: int, scales: Tensor) -> Tensor:
    """x [T, K] times (code - 8) · scale + value of code 8, both of [K / G, N, 2], all bfloat16: [T, N]."""
    assert x.dtype == scales.dtype == torch.bfloat16, "a device supports no other type"
    assert codes.dim() == 4 and scales.shape[0] * group == x.shape[1] and group in (32, 64, 128, 256)
    pairs = codes.reshape(scales.shape[1], -1).view(torch.uint8)
    code = torch.stack([pairs >> 4, pairs & 15], dim=2).view(len(pairs), -1).float() - _MIDDLE
    step, middle = (scales[..., part].float().repeat_interleave(group, 0).T for part in (0, 1))
    return (x.float() @ (code * step + middle).bfloat16().float().T).to(x.dtype)

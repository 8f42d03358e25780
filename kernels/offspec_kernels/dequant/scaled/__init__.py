"""What formats of integers have in common: value = (code − zero) · scale.

Their libraries make the product in the dtype of the scales, so that it is rounded there once. Codes lie in
int32 words, as a stream of bits, the lowest first; where 32 is no multiple of their bits, some codes begin in
one word and end in the next.
"""

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Shape
from offspec_kernels.errors import ArgumentError

SCALES = (torch.float16, torch.bfloat16, torch.float32)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """The codes in int32 words: along `dim`, each stream becomes as many codes, int32, as it can hold."""
    stream = words.movedim(dim, -1).long() & 0xFFFFFFFF
    size = stream.shape[-1]
    place = torch.arange(size * 32 // bits, device=words.device) * bits
    first, offset = place // 32, place % 32
    begun = stream[..., first] >> offset
    ended = stream[..., (first + 1).clamp(max=size - 1)] << (32 - offset)
    return ((begun | ended) & ((1 << bits) - 1)).int().movedim(-1, dim)


def scaled(difference: Tensor, scales: Tensor) -> Tensor:
    """float32. difference: integers of up to 255 in size, which every dtype of scales has; scales as wide."""
    return (difference.to(scales.dtype) * scales).float()


def check_scales(scales: torch.dtype) -> None:
    if scales not in SCALES:
        raise ArgumentError("scales", f"must be float16, bfloat16 or float32, not {scales}")


def check_groups(group: int, columns: int) -> None:
    if group < 1 or columns % group:
        raise ArgumentError("shape", f"{columns} columns do not make whole groups of {group}")


def check_index(g_idx: Tensor, groups: int) -> None:
    """g_idx: of each column, its group. A loop over bytes does not look where it reads."""
    low, high = g_idx.aminmax()
    if low < 0 or high >= groups:
        raise ArgumentError(
            "g_idx", f"groups go from 0 to {groups - 1}, and it has {int(low)} to {int(high)}"
        )


def plain(shape: Shape, name: str) -> tuple[int, int]:
    """The rows and columns of a weight that has no other dimensions."""
    if len(shape) != 2:
        raise ArgumentError("shape", f"a {name} weight has rows and columns, not {list(shape)}")
    return shape[0], shape[1]

"""Common parts of integer formats: value = (code − zero) · scale.

Their libraries compute the product in the dtype of the scales, which rounds it once. Codes are stored in
int32 words, as a stream of bits, the lowest first; if their bits do not divide 32, some codes cross a word
boundary.
"""

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Shape
from offspec_kernels.errors import ArgumentError

SCALES = (torch.float16, torch.bfloat16, torch.float32)


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack the codes in int32 words: along `dim`, each stream becomes all int32 codes that it can hold."""
    stream = words.movedim(dim, -1).long() & 0xFFFFFFFF
    size = stream.shape[-1]
    place = torch.arange(size * 32 // bits, device=words.device) * bits
    first, offset = place // 32, place % 32
    begun = stream[..., first] >> offset
    ended = stream[..., (first + 1).clamp(max=size - 1)] << (32 - offset)
    return ((begun | ended) & ((1 << bits) - 1)).int().movedim(-1, dim)


def scaled(difference: Tensor, scales: Tensor) -> Tensor:
    """Return float32 products. difference: integers up to ±255, exact in every scale dtype; scales alike."""
    return (difference.to(scales.dtype) * scales).float()


def check_scales(scales: torch.dtype) -> None:
    if scales not in SCALES:
        raise ArgumentError("scales", f"must be float16, bfloat16 or float32, not {scales}")


def check_groups(group: int, columns: int) -> None:
    if group < 1 or columns % group:
        raise ArgumentError("shape", f"{columns} columns are not a multiple of the group size {group}")


def check_index(g_idx: Tensor, groups: int) -> None:
    """Check g_idx, the group of each column, since compiled loops do not check bounds."""
    low, high = g_idx.aminmax()
    if low < 0 or high >= groups:
        raise ArgumentError("g_idx", f"groups must be from 0 to {groups - 1}, not {int(low)} to {int(high)}")


def plain(shape: Shape, name: str) -> tuple[int, int]:
    """Return the rows and columns of a two-dimensional weight."""
    if len(shape) != 2:
        raise ArgumentError("shape", f"a {name} weight must have two dimensions, not {list(shape)}")
    return shape[0], shape[1]

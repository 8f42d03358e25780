"""Weights rounded to 4 bits: NF4 codes in blocks of 64 (QLoRA: Dettmers et al. 2023, arXiv 2305.14314).

Two codes a byte, the first in the high half, and one float32 scale a block: 4.5 bits a weight, in the
layout of bitsandbytes, whose kernels unpack it where they are installed. The scale is not the block's
largest magnitude but the best of a few near it, which brings the rounded weights closer for no more bytes.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 64

# The 16 levels of the published data type.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip

_SHRINKS = (1.0, 0.95, 0.9, 0.85)
_ROWS_AT_A_TIME = 1 << 14  # blocks rounded together; bounds the float32 scratch


@dataclass(frozen=True, slots=True)
class Packed:
    """A rounded tensor. codes [ceil(n / 2)] uint8; scales [ceil(n / 64)] float32; n = product of shape."""

    codes: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack(weight: torch.Tensor) -> Packed:
    """Round a tensor of any shape; the last block is padded with zeros."""
    flat = weight.reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    codes = torch.empty(len(padded), BLOCK // 2, dtype=torch.uint8)
    scales = torch.empty(len(padded), dtype=torch.float32)
    for start in range(0, len(padded), _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        index, scales[part] = _round(padded[part].float())
        codes[part] = (index[:, ::2] << 4) | index[:, 1::2]
    return Packed(codes.view(-1), scales, weight.shape, weight.dtype)


def _round(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [B, 64] uint8 and scales [B] of the blocks [B, 64], least squares over the tried scales."""
    levels = torch.tensor(NF4)
    borders = (levels[1:] + levels[:-1]) / 2
    largest = blocks.abs().amax(dim=1, keepdim=True).clamp_min_(1e-30)
    best_gain, best_tried = torch.full((len(blocks), 1), -1.0), largest
    for shrink in _SHRINKS:
        tried = largest * shrink
        chosen = levels[torch.bucketize(blocks / tried, borders)]
        # With the codes given, the best scale is a projection, and the squared error it leaves is |w|^2
        # less this gain.
        gain = (chosen * blocks).sum(1, keepdim=True).square_() / chosen.square_().sum(1, keepdim=True)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_tried = torch.where(better, tried, best_tried)
    index = torch.bucketize(blocks / best_tried, borders)
    chosen = levels[index]
    scales = (chosen * blocks).sum(1) / chosen.square_().sum(1).clamp_min_(1e-30)
    return index.to(torch.uint8), scales


def unpack(packed: Packed) -> torch.Tensor:
    """The rounded weights in their own shape and dtype, by bitsandbytes where it is installed."""
    kernels = _bitsandbytes()
    if kernels is None or packed.shape.numel() % BLOCK:
        return unpack_reference(packed)
    state = kernels.QuantState(packed.scales, packed.shape, None, BLOCK, "nf4", packed.dtype)
    out: torch.Tensor = kernels.dequantize_4bit(packed.codes[:, None], state)
    return out


@functools.cache
def _bitsandbytes() -> Any:
    """bitsandbytes' functions, or None: it is not on every machine, and says much while it is imported."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        import bitsandbytes.functional as functions
    except ImportError:
        return None
    finally:
        logger.setLevel(level)
    return functions


def unpack_reference(packed: Packed) -> torch.Tensor:
    """The same, slow and obvious: level times scale, rounded once to the dtype."""
    levels = torch.tensor(NF4, device=packed.codes.device)
    codes = packed.codes.long()
    pairs = torch.stack([levels[codes >> 4], levels[codes & 15]], dim=-1).view(-1, BLOCK)
    flat = (pairs * packed.scales[:, None]).view(-1)[: packed.shape.numel()]
    return flat.view(packed.shape).to(packed.dtype)

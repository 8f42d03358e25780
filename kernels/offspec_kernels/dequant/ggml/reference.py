"""Decoders of each GGUF type with torch operations, in llama.cpp's order of operations.

Every decoder takes uint8 [B, bytes of a block] and returns float32 [B, values of a block]. A block has a
float16 scale, and another float16 if its values have an offset; MXFP4 has an exponent of 2. Blocks of 256
also have 8 or 16 scales and offsets of few bits, in units of the first.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from offspec_kernels.dequant.float4 import half_power, table

# Values of the IQ4 types' codes: denser near 0, where most weights are.
CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _planes(bytes_: Tensor, bits: int) -> Tensor:
    """Unpack [..., n] to [..., n · 8 / bits]: the lowest bits of all bytes, then the next ones."""
    return torch.cat([(bytes_ >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -1)


def _fields(bytes_: Tensor, bits: int) -> Tensor:
    """Unpack [..., n] to [..., n · 8 / bits]: all of the first byte, low bits first, then the next byte."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_.device)
    return ((bytes_[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _half(blocks: Tensor, start: int) -> Tensor:
    """Return the float16 at a byte of every block, as float32 [B, 1]."""
    two = blocks[:, start : start + 2].clone(memory_format=torch.contiguous_format)
    return two.view(torch.float16).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_planes(blocks[:, 2:], 4).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _planes(blocks[:, 4:], 4).float() + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    code = _planes(blocks[:, 6:], 4) | (_fields(blocks[:, 2:6], 1) << 4)
    return _half(blocks, 0) * (code.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    code = _planes(blocks[:, 8:], 4) | (_fields(blocks[:, 4:8], 1) << 4)
    return _half(blocks, 0) * code.float() + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8).float()


def _q2_k(blocks: Tensor) -> Tensor:
    scale = (_half(blocks, 80) * (blocks[:, :16] & 15).float())[..., None]  # [B, 16, 1]
    least = (_half(blocks, 82) * (blocks[:, :16] >> 4).float())[..., None]
    code = _planes(blocks[:, 16:80].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    return (scale * code.float() - least).flatten(1)


def _q3_k(blocks: Tensor) -> Tensor:
    packed = blocks[:, 96:108]
    six = _planes(packed[:, :8], 4) | (_planes(packed[:, 8:], 2) << 4)  # [B, 16]
    scale = (_half(blocks, 108) * (six.float() - 32))[..., None]
    low = _planes(blocks[:, 32:96].unflatten(1, (2, 32)), 2).view(-1, 16, 16)
    code = low | (_planes(blocks[:, :32], 1) << 2).view(-1, 16, 16)
    return (scale * (code.float() - 4)).flatten(1)


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return 8 scales and 8 offsets, 6 bits each, from a Q4_K or Q5_K block's 12 bytes, float32 [B, 8, 1]."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat([first & 63, (rest & 15) | (first >> 6 << 4)], 1)
    least = torch.cat([second & 63, (rest >> 4) | (second >> 6 << 4)], 1)
    return scale.float()[..., None], least.float()[..., None]


def _q4_k(blocks: Tensor) -> Tensor:
    scale, least = _scales(blocks[:, 4:16])
    code = _planes(blocks[:, 16:].unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    d, lowest = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (d * scale * code.float() - lowest * least).flatten(1)


def _q5_k(blocks: Tensor) -> Tensor:
    scale, least = _scales(blocks[:, 4:16])
    low = _planes(blocks[:, 48:].unflatten(1, (4, 32)), 4).view(-1, 8, 32)
    code = low | (_planes(blocks[:, 16:48], 1) << 4).view(-1, 8, 32)
    d, lowest = _half(blocks, 0)[..., None], _half(blocks, 2)[..., None]
    return (d * scale * code.float() - lowest * least).flatten(1)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _planes(blocks[:, :128].unflatten(1, (2, 64)), 4)  # [B, 2, 128]
    code = low | (_planes(blocks[:, 128:192].unflatten(1, (2, 32)), 2) << 4)
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(torch.int8).float())[..., None]  # [B, 16, 1]
    return (scale * (code.float() - 32).view(-1, 16, 16)).flatten(1)


def _looked_up(codes: Tensor) -> Tensor:
    return torch.tensor(CODEBOOK, dtype=torch.float32, device=codes.device)[codes.long()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _looked_up(_planes(blocks[:, 2:], 4))


def _iq4_xs(blocks: Tensor) -> Tensor:
    six = _fields(blocks[:, 4:8], 4) | (_fields(blocks[:, 2:4], 2) << 4)  # [B, 8]
    scale = (_half(blocks, 0) * (six.float() - 32))[..., None]
    return (scale * _looked_up(_planes(blocks[:, 8:].unflatten(1, (8, 16)), 4))).flatten(1)


def _mxfp4(blocks: Tensor) -> Tensor:
    codes = _planes(blocks[:, 1:], 4)
    values = table(codes.device, doubled=True) + 0.0  # adding 0 removes the sign of -0
    return half_power(blocks[:, :1]) * values[codes.long()]


DECODERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}

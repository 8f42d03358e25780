"""The formats that the dequantisation bench times, and random weights in them."""

from __future__ import annotations

import torch
from torch import Tensor

from offspec_kernels.dequant import Format, Part
from offspec_kernels.dequant.awq import Awq
from offspec_kernels.dequant.codebook import Codebook
from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.float8 import Float8
from offspec_kernels.dequant.ggml import Ggml
from offspec_kernels.dequant.ggml.layout import LAYOUTS
from offspec_kernels.dequant.gptq import Gptq
from offspec_kernels.dequant.grouped import BITS, Grouped
from offspec_kernels.dequant.int8rows import Int8Rows

GROUP = (
    128  # inputs that share a scale, as most published checkpoints of AWQ, GPTQ and llm-compressor have it
)

FORMATS: dict[str, Format] = {
    **{f"int{bits}-g64": Grouped(bits) for bits in BITS},
    "nf4": Codebook("nf4", absmax=torch.float16),
    "bnb-nf4": Codebook("nf4", dtype=torch.bfloat16),
    "bnb-nf4-nested": Codebook("nf4", absmax=torch.uint8, nested=256, dtype=torch.bfloat16),
    "bnb-fp4": Codebook("fp4", dtype=torch.bfloat16),
    "bnb-int8": Int8Rows(),
    "awq": Awq(GROUP),
    **{f"gptq-int{bits}": Gptq(bits, GROUP, act_order=False) for bits in (2, 3, 4, 8)},
    "gptq-int4-act-order": Gptq(4, GROUP, act_order=True),
    "ct-int4": CompressedInt(4, packed=True, group=GROUP, zero_point=False),
    "ct-int4-zeros": CompressedInt(4, packed=True, group=GROUP, zero_point=True),
    "ct-int8": CompressedInt(8, packed=False, group=None, zero_point=False),
    "ct-fp8": Float8(None, "channel", torch.bfloat16),
    "fp8-blocks": Float8((128, 128), "block", rounded=False),
    **{kind: Ggml(kind) for kind in LAYOUTS},
}


def random_parts(format: Format, shape: tuple[int, ...], device: torch.device) -> dict[str, Tensor]:
    """A weight of random codes and scales."""
    random = torch.Generator().manual_seed(0)
    parts = {name: _random(part, random) for name, part in format.parts(shape).items()}
    if "g_idx" in parts:
        parts["g_idx"] = torch.randperm(shape[1], generator=random).int() // GROUP
    return {name: part.to(device) for name, part in parts.items()}


def packed_bytes(parts: dict[str, Tensor]) -> int:
    return sum(part.nbytes for part in parts.values())


def _random(part: Part, random: torch.Generator) -> Tensor:
    if part.dtype.is_floating_point and part.dtype.itemsize > 1:
        return (torch.rand(part.shape, generator=random) + 0.5).to(part.dtype)
    # Any two such bytes make a float16 that is finite and not subnormal, wherever a block has its scales:
    # what is neither may take a processor longer, and no real weight has it.
    nbytes = torch.Size(part.shape).numel() * part.dtype.itemsize
    codes = torch.randint(0x20, 0x60, (nbytes,), dtype=torch.uint8, generator=random)
    return codes.view(part.dtype).view(part.shape)

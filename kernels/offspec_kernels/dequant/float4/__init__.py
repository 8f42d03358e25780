"""Floats of 4 bits, a sign, two bits of exponent and one of fraction, in blocks of a row with a scale each.

MXFP4 is the Open Compute Project's, as gpt-oss publishes its experts: 32 values share a power of 2. NVFP4 is
NVIDIA's: 16 share an 8-bit float, which is multiplied or divided by one float32 for the whole weight.

Two values share a byte, the first in its low half. Loops and kernels are those of `codebook`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.scaled import plain
from offspec_kernels.errors import ArgumentError

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by code; 8 to 15 are their negatives


class Float4(Format):
    """What both have in common. Of the parts, `codes` has two to a byte, and `scales` a byte for a block."""

    __slots__ = ()
    codes, scales = "weight", "scale"
    block = 32
    doubled = False  # whether scales come halved, and values are those of twice their codes
    dtype: torch.dtype | None = None  # what the library rounds values to; None: float32

    @abstractmethod
    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        """What each byte of a scale stands for, float32 [256]."""

    def _of_blocks(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The scale of each block, float32 [blocks]."""
        return self.sizes(parts)[parts[self.scales].view(-1).view(torch.uint8).int()]

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes = parts[self.codes].view(-1)
        code = torch.stack([codes & 15, codes >> 4], 1).view(-1, self.block).int()
        values = (table(codes.device, self.doubled)[code] * self._of_blocks(parts)[:, None]).to(
            self.dtype or torch.float32
        )
        stored = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        values = values.float().view(stored)
        return values.mT if self.transposed else values

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.codebook import triton

        values, sizes = table(out.device, self.doubled), self._of_blocks(parts)
        triton.fill_from_table(parts[self.codes], sizes, values, self.block, self.dtype, out, low_first=True)


@dataclass(frozen=True, slots=True)
class Mxfp4(Float4):
    """Experts as gpt-oss stores them: a weight [..., columns, rows], the last two dimensions exchanged.

    Parts, columns in groups of 32: blocks uint8 [..., rows, groups, 16]; scales uint8 [..., rows, groups],
    exponents of 2, 127 more than they are.
    """

    name = "mxfp4"
    transposed = True
    codes, scales = "blocks", "scales"
    doubled = True

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) < 2 or shape[-2] % self.block:
            raise ArgumentError("shape", f"{list(shape)} does not make whole groups of {self.block}")
        scales = (*shape[:-2], shape[-1], shape[-2] // self.block)
        return {"blocks": Part(torch.uint8, (*scales, 16)), "scales": Part(torch.uint8, scales)}

    def cut(self, shape: Shape, start: int, end: int) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return None if len(shape) < 3 else (self, dict.fromkeys(("blocks", "scales"), (start, end)))

    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        return half_power(torch.arange(256, device=parts["scales"].device))


@dataclass(frozen=True, slots=True)
class Nvfp4(Float4):
    """A weight [rows, columns], columns in groups of 16.

    Parts: weight uint8 [rows, columns / 2]; scale float8_e4m3fn [rows, columns / 16]; global_scale float32
    [1], of which the dimension may be missing.

    divided: whether scales are divided by the global one, as compressed-tensors has them, and not multiplied.
    dtype: what values are rounded to; None: they are float32.
    """

    name = "nvfp4"
    block = 16
    loose = ("global_scale",)
    divided: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
            raise ArgumentError("dtype", f"must be a float of 16 or 32 bits, not {self.dtype}")

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = plain(shape, self.name)
        if columns % self.block:
            raise ArgumentError("shape", f"{columns} columns do not make whole groups of {self.block}")
        return {
            "weight": Part(torch.uint8, (rows, columns // 2)),
            "scale": Part(torch.float8_e4m3fn, (rows, columns // self.block)),
            "global_scale": Part(torch.float32, (1,)),
        }

    def cut(self, shape: Shape, start: int, end: int) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return self, dict.fromkeys(("weight", "scale"), (start, end))

    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        whole = parts["global_scale"].view(())
        every = torch.arange(256, device=whole.device).to(torch.uint8).view(torch.float8_e4m3fn).float()
        return every / whole if self.divided else every * whole


def half_power(exponents: Tensor) -> Tensor:
    """2 to the exponents less 128, float32: half a scale, since the largest is no float32."""
    bits = exponents.int()
    small = torch.full_like(bits, 1 << 21) << bits.clamp(max=1)  # below the normal numbers
    return torch.where(bits < 2, small, (bits - 1) << 23).view(torch.float32)


def table(device: torch.device, doubled: bool) -> Tensor:
    """The values of all codes, float32 [16], twice that if doubled."""
    return torch.tensor((*VALUES, *(-value for value in VALUES)), device=device) * (1 + doubled)

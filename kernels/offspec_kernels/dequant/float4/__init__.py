"""4-bit floats (a sign, two exponent bits, one fraction bit) in blocks of a row with a scale each.

MXFP4 is the Open Compute Project's format, used by gpt-oss for its experts: 32 values share a power of 2.
NVFP4 is NVIDIA's: 16 values share an 8-bit float, multiplied or divided by one float32 for the whole weight.

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
    """Common base of MXFP4 and NVFP4; part `codes` has two codes per byte, `scales` one byte per block."""

    __slots__ = ()
    codes, scales = "weight", "scale"
    block = 32
    doubled = False  # whether scales are halved, and code values doubled
    dtype: torch.dtype | None = None  # dtype to which the library rounds values; None: float32

    @abstractmethod
    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the value of each scale byte, float32 [256]."""

    def _of_blocks(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the scale of each block, float32 [blocks]."""
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
    """Experts as stored by gpt-oss: a weight [..., columns, rows], the last two dimensions swapped.

    Parts, columns in groups of 32: blocks uint8 [..., rows, groups, 16]; scales uint8 [..., rows, groups],
    exponents of 2 with a bias of 127.
    """

    name = "mxfp4"
    transposed = True
    codes, scales = "blocks", "scales"
    doubled = True

    def parts(self, shape: Shape) -> dict[str, Part]:
        if len(shape) < 2 or shape[-2] % self.block:
            raise ArgumentError("shape", f"{list(shape)} is not divisible into groups of {self.block}")
        scales = (*shape[:-2], shape[-1], shape[-2] // self.block)
        return {"blocks": Part(torch.uint8, (*scales, 16)), "scales": Part(torch.uint8, scales)}

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return None if len(shape) < 3 else (self, dict.fromkeys(("blocks", "scales"), (start, end)))

    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        return half_power(torch.arange(256, device=parts["scales"].device))


@dataclass(frozen=True, slots=True)
class Nvfp4(Float4):
    """Weight [rows, columns], columns in groups of 16.

    Parts: weight uint8 [rows, columns / 2]; scale float8_e4m3fn [rows, columns / 16]; global_scale float32
    [1], whose dimension may be missing.

    divided: whether scales are divided by the global scale, as in compressed-tensors, and not multiplied.
    dtype: dtype to which values are rounded; None: float32.
    """

    name = "nvfp4"
    block = 16
    squeezable_parts = ("global_scale",)
    divided: bool = False
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in (None, torch.float16, torch.bfloat16, torch.float32):
            raise ArgumentError("dtype", f"must be a 16-bit or 32-bit float, not {self.dtype}")

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = plain(shape, self.name)
        if columns % self.block:
            raise ArgumentError(
                "shape", f"{columns} columns are not a multiple of the group size {self.block}"
            )
        return {
            "weight": Part(torch.uint8, (rows, columns // 2)),
            "scale": Part(torch.float8_e4m3fn, (rows, columns // self.block)),
            "global_scale": Part(torch.float32, (1,)),
        }

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        return self, dict.fromkeys(("weight", "scale"), (start, end))

    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        whole = parts["global_scale"].view(())
        every = torch.arange(256, device=whole.device).to(torch.uint8).view(torch.float8_e4m3fn).float()
        return every / whole if self.divided else every * whole


def half_power(exponents: Tensor) -> Tensor:
    """Return 2^(exponent - 128), float32: half a scale, since the largest scale overflows float32."""
    bits = exponents.int()
    small = torch.full_like(bits, 1 << 21) << bits.clamp(max=1)  # subnormal numbers
    return torch.where(bits < 2, small, (bits - 1) << 23).view(torch.float32)


def table(device: torch.device, doubled: bool) -> Tensor:
    """Return the values of all codes, float32 [16], doubled if requested."""
    return torch.tensor((*VALUES, *(-value for value in VALUES)), device=device) * (1 + doubled)

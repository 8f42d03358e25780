"""Uniform quantization: each group of 64 weights of a row has a float16 step and a float16 offset.

This is offspec's own format for weights it quantizes itself: value = code · step + offset, computed in
float32. The codes of a group are stored in planes, so that a wide register unpacks many at once:

- 8 bits: 64 bytes, one per code.
- 4 bits: 32 bytes; byte j has code j in its low half, and code j + 32 in its high half.
- 2 bits: 16 bytes; byte j has codes j, j + 16, j + 32 and j + 48, the lowest bits first.
- 3 bits: the two low bits of all codes as above, then 8 bytes; bit b of byte j is the high bit of code
  8 b + j.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape, rows_and_columns
from offspec_kernels.errors import ArgumentError

GROUP = 64
BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Grouped(Format):
    """Codes of 2, 3, 4 or 8 bits.

    Parts of a weight [..., columns], columns a multiple of 64, rows = the product of all earlier dimensions:
    codes uint8 [rows, columns · bits / 8]; step, offset float16 [rows, columns / 64].
    """

    by_rows = True
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ArgumentError("bits", f"must be one of {BITS}, not {self.bits}")

    @property
    def name(self) -> str:
        return f"int{self.bits}-g{GROUP}"

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = rows_and_columns(shape)
        if columns % GROUP:
            raise ArgumentError("shape", f"{columns} columns are not a multiple of the group size {GROUP}")
        scales = Part(torch.float16, (rows, columns // GROUP))
        return {
            "codes": Part(torch.uint8, (rows, columns * self.bits // 8)),
            "step": scales,
            "offset": scales,
        }

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        groups = parts["codes"].view(-1, GROUP * self.bits // 8)
        code = unpack_codes(groups, self.bits).float()
        step, offset = parts["step"].view(-1, 1).float(), parts["offset"].view(-1, 1).float()
        return (code * step + offset).view(shape)

    def column_multiple(self, shape: Shape) -> int:
        return GROUP

    eager = Format.fill_by_rows


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [groups, 64] into planes, uint8 [groups, 8 · bits]."""
    if bits == 8:
        return codes
    if bits == 3:
        high = (codes >> 2).view(-1, 8, 8)
        weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
        top = (high * weights[:, None]).sum(1, dtype=torch.uint8)
        return torch.cat([pack_codes(codes & 3, 2), top], 1)
    planes = codes.view(len(codes), 8 // bits, -1)
    packed = planes[:, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, plane] << (bits * plane)
    return packed


def unpack_codes(packed: Tensor, bits: int) -> Tensor:
    """Invert `pack_codes`."""
    if bits == 8:
        return packed
    if bits == 3:
        bit = torch.arange(8, dtype=torch.uint8, device=packed.device)[:, None]
        high = ((packed[:, None, 16:] >> bit) & 1).view(len(packed), GROUP)
        return unpack_codes(packed[:, :16], 2) | (high << 2)
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (bits * plane)) & mask for plane in range(8 // bits)], 1)

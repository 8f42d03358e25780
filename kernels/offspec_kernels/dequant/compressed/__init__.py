"""Integers as stored by compressed-tensors (the format of vLLM and LLM Compressor).

"pack-quantized" stores the codes of a row as a stream of bits in int32 words, minus their smallest value;
"int-quantized" and "naive-quantized" store int8. A zero point is a code, too, packed down the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.scaled import (
    check_groups,
    check_index,
    check_scales,
    plain,
    scaled,
    unpack,
)
from offspec_kernels.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class CompressedInt(Format):
    """Codes of 1 to 8 bits.

    packed: whether codes are in words, not one per byte. group: columns that share a scale; None for a whole
    row, 0 for the whole weight. act_order: whether columns were quantized in order of importance, with their
    groups in g_idx; compressed-tensors has dropped this, but such checkpoints exist.

    Parts of a weight [rows, columns], with groups = columns / group, or 1, and words(n) = n · bits / 32,
    rounded up: weight int32 [rows, words(columns)] if packed, else int8 [rows, columns]; scale
    [rows, groups], or [1] for the weight; zero_point int32 [words(rows), groups] if packed, but int8 [1]
    for the weight, else int8 of scale's shape; g_idx int32 [columns]. Size-1 dimensions of scale, and of an
    unpacked zero_point, may be missing.
    """

    bits: int
    packed: bool
    group: int | None
    zero_point: bool
    act_order: bool = False
    scales: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ArgumentError("bits", f"must be 1 to 8, not {self.bits}")
        if self.group is not None and self.group < 0:
            raise ArgumentError("group", f"must be a number of columns, 0 or None, not {self.group}")
        if self.act_order and not self.group:
            raise ArgumentError("act_order", "requires groups of columns")
        check_scales(self.scales)

    @property
    def name(self) -> str:
        return f"compressed-tensors int{self.bits}"

    @property
    def by_rows(self) -> bool:
        return self.group != 0 and not self.act_order and not (self.zero_point and self.packs_zeros)

    @property
    def packs_zeros(self) -> bool:
        return self.packed and self.group != 0

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = plain(shape, self.name)
        group = self.group or columns
        check_groups(group, columns)
        each = (1,) if self.group == 0 else (rows, columns // group)
        parts = {
            "weight": Part(torch.int8, shape),
            "scale": Part(self.scales, each),
        }
        if self.packed:
            parts["weight"] = Part(torch.int32, (rows, self.words(columns)))
        if self.zero_point:
            packed = Part(torch.int32, (self.words(rows), columns // group))
            parts["zero_point"] = packed if self.packs_zeros else Part(torch.int8, each)
        if self.act_order:
            parts["g_idx"] = Part(torch.int32, (columns,))
        return parts

    def words(self, codes: int) -> int:
        return (codes * self.bits + 31) // 32

    @property
    def squeezable_parts(self) -> tuple[str, ...]:
        return ("scale",) if self.packs_zeros else ("scale", "zero_point")

    def check_values(self, parts: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError if g_idx contains an invalid group."""
        if self.act_order:
            check_index(parts["g_idx"], parts["scale"].shape[-1])

    def zeros(self, parts: Mapping[str, Tensor], rows: int, groups: int) -> Tensor:
        """Return the zero point of each row and group, [rows, groups] integers like the codes of `weight`."""
        middle = 1 << (self.bits - 1) if self.packed else 0
        if not self.zero_point:
            return torch.full((rows, groups), middle, device=parts["scale"].device)
        zeros = parts["zero_point"]
        if self.packs_zeros:
            return unpack(zeros.view(-1, groups), self.bits, 0)[:rows]
        return (zeros.int() + middle).view(-1, groups).expand(rows, groups)

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        self.check_values(parts)
        rows, columns = shape
        groups = columns // (self.group or columns)
        codes = unpack(parts["weight"], self.bits, 1)[:, :columns] if self.packed else parts["weight"].int()
        zeros, scales = self.zeros(parts, rows, groups), parts["scale"].view(-1, groups).expand(rows, groups)
        if self.act_order:
            index = parts["g_idx"].long()
        else:
            index = torch.arange(columns, device=codes.device) // (self.group or columns)
        return scaled(codes - zeros[:, index], scales[:, index])

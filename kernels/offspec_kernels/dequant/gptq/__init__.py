"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as stored by AutoGPTQ and GPTQModel.

A weight is stored transposed: words are filled along the input dimension. Each group of inputs has a zero
point and a scale for every output. With act-order, inputs were quantized in order of importance; `g_idx`
contains their groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.scaled import check_groups, check_index, check_scales, plain, scaled, unpack
from offspec_kernels.errors import ArgumentError

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class Gptq(Format):
    """Codes of 2, 3, 4 or 8 bits.

    group: inputs that share a scale; -1 for all. zero_plus_one: whether the file is in the first version of
    the format, which stores each zero point minus 1. Parts of a weight [out, in] whose dimensions fill words:
    qweight int32 [in · bits / 32, out]; qzeros int32 [in / group, out · bits / 32]; scales [in / group, out];
    and with act_order g_idx int32 [in].
    """

    transposed = True
    bits: int
    group: int
    act_order: bool
    zero_plus_one: bool = True
    scales: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ArgumentError("bits", f"must be one of {BITS}, not {self.bits}")
        if self.group < 1 and self.group != -1:
            raise ArgumentError("group", f"must be a number of inputs, or -1 for all, not {self.group}")
        check_scales(self.scales)

    @property
    def name(self) -> str:
        return f"gptq int{self.bits}"

    def parts(self, shape: Shape) -> dict[str, Part]:
        out, inputs = plain(shape, self.name)
        group = self.group_of(inputs)
        check_groups(group, inputs)
        for size, of in ((inputs, "columns"), (out, "rows")):
            if size * self.bits % 32:
                raise ArgumentError("shape", f"{size} {of} of {self.bits} bits do not fill whole words")
        parts = {
            "qweight": Part(torch.int32, (inputs * self.bits // 32, out)),
            "qzeros": Part(torch.int32, (inputs // group, out * self.bits // 32)),
            "scales": Part(self.scales, (inputs // group, out)),
        }
        if self.act_order:
            parts["g_idx"] = Part(torch.int32, (inputs,))
        return parts

    def group_of(self, inputs: int) -> int:
        return inputs if self.group == -1 else self.group

    def check_values(self, parts: Mapping[str, Tensor]) -> None:
        """Raise ArgumentError if g_idx contains an invalid group."""
        if self.act_order:
            check_index(parts["g_idx"], len(parts["scales"]))

    def index(self, parts: Mapping[str, Tensor], inputs: int) -> Tensor:
        """Return the group of each input: int32 [in]."""
        if self.act_order:
            return parts["g_idx"]
        inputs_ = torch.arange(inputs, dtype=torch.int32, device=parts["scales"].device)
        return inputs_ // self.group_of(inputs)

    def zero_words(self, qzeros: Tensor) -> Tensor:
        """Return the words of the actual zero points.

        GPTQModel adds 1 to all of a word's zeros at once, so a zero of 2^bits − 1 carries into its neighbour;
        its packing subtracts in the same way. 3-bit zeros, which cross word boundaries, are returned
        unchanged.
        """
        if not self.zero_plus_one or self.bits == 3:
            return qzeros
        return qzeros + sum(1 << bit for bit in range(0, 32, self.bits))

    @property
    def later_plus_one(self) -> int:
        """Return the amount still to be added to each unpacked zero, modulo 2^bits."""
        return int(self.zero_plus_one and self.bits == 3)

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        self.check_values(parts)
        group = self.index(parts, shape[1]).long()
        codes = unpack(parts["qweight"], self.bits, 0)
        zeros = unpack(self.zero_words(parts["qzeros"]), self.bits, 1)
        zeros = (zeros + self.later_plus_one) & ((1 << self.bits) - 1)
        return scaled(codes - zeros[group], parts["scales"][group]).mT

    def column_multiple(self, shape: Shape) -> int:
        from offspec_kernels.dequant.avx512 import has_lookups

        # Groups may change from row to row, and 3-bit codes cross word boundaries.
        return 2 if has_lookups() and self.bits != 3 and not self.act_order else 0

"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

A weight lies transposed: words fill up along the input. Each group of inputs has a zero and a scale for every
output. With act-order, inputs were rounded in the order of how much they matter; `g_idx` has their groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from offspec_kernels.dequant.compressed import CompressedInt
from offspec_kernels.dequant.format import Format, Shape
from offspec_kernels.dequant.gptq.layout import BITS, GptqLayout

__all__ = ["BITS", "Gptq"]


@dataclass(frozen=True, slots=True)
class Gptq(GptqLayout):
    """Codes of 2, 3, 4 or 8 bits. See `GptqLayout` for settings and parts."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.gptq import native

        self.check_values(parts)
        native.fill(self, parts, out)

    def some_rows(
        self, parts: Mapping[str, Tensor], shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, Tensor]] | None:
        """As compressed-tensors would store them: the same words, by rows."""
        words = [row * self.bits // 32 for row in (start, end)]  # of zeros, which lie along the rows
        if self.later_plus_one or start * self.bits % 32 or end * self.bits % 32:
            return None
        kind = CompressedInt(
            self.bits, True, self.group_of(shape[1]), True, act_order=self.act_order, scales=self.scales
        )
        some = {
            "weight": parts["qweight"][:, start:end].mT.contiguous(),
            "scale": parts["scales"][:, start:end].mT.contiguous(),
            "zero_point": self.zero_words(parts["qzeros"][:, slice(*words)]).mT.contiguous(),
        }
        return kind, some | ({"g_idx": parts["g_idx"]} if self.act_order else {})

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.gptq import triton

        triton.fill(self, parts, out)

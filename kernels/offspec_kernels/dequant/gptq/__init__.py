"""GPTQ (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel store it.

A weight lies transposed: words fill up along the input. Each group of inputs has a zero and a scale for every
output. With act-order, inputs were rounded in the order of how much they matter; `g_idx` has their groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Filler, Shape
from offspec_kernels.dequant.gptq.layout import BITS, GptqLayout

__all__ = ["BITS", "Gptq"]


@dataclass(frozen=True, slots=True)
class Gptq(GptqLayout):
    """Codes of 2, 3, 4 or 8 bits. See `GptqLayout` for settings and parts."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.gptq import native

        self.check_values(parts)
        native.fill(self, parts, out)

    def fill_step(self, shape: Shape) -> int:
        from offspec_kernels.dequant.registers import has_lookups

        # Groups may change from row to row, and codes of 3 bits lie across words.
        return 2 if has_lookups() and self.bits != 3 and not self.act_order else 0

    def filler(self, parts: Mapping[str, Tensor], shape: Shape, dtype: torch.dtype) -> Filler:
        from offspec_kernels.dequant.gptq import native

        return native.filler(self, parts, shape[1])

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.gptq import triton

        triton.fill(self, parts, out)

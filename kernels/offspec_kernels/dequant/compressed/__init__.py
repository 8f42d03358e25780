"""Integers as compressed-tensors stores them (vLLM's and LLM Compressor's format).

"pack-quantized" has codes of a row as a stream of bits in int32 words, less their smallest value;
"int-quantized" and "naive-quantized" have int8. A zero is a code too, and packed down the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from offspec_kernels.dequant.compressed.layout import CompressedIntLayout
from offspec_kernels.dequant.format import Shape


@dataclass(frozen=True, slots=True)
class CompressedInt(CompressedIntLayout):
    """Codes of 1 to 8 bits. See `CompressedIntLayout` for settings and parts."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.compressed import native

        self.check_values(parts)
        native.fill(self, parts, out)

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.compressed import triton

        triton.fill(self, parts, out)

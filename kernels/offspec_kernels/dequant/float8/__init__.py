"""Floats of 8 bits with scales: fine-grained FP8 (DeepSeek-V3, arXiv:2412.19437) and compressed-tensors' own.

value = weight · scale. A scale belongs to a block of rows and columns, to a row, or to the weight; the last
blocks of a row, and those of the last rows, may be cut off.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from offspec_kernels.dequant.float8.layout import Float8Layout
from offspec_kernels.dequant.format import Shape


@dataclass(frozen=True, slots=True)
class Float8(Float8Layout):
    """float8_e4m3fn, whose 0x7F and 0xFF are NaN. See `Float8Layout` for settings and parts."""

    def eager(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.float8 import native

        native.fill(self, parts, out.flatten(0, -2))

    def triton(self, parts: Mapping[str, Tensor], shape: Shape, out: Tensor) -> None:
        from offspec_kernels.dequant.float8 import triton

        triton.fill(self, parts, out.flatten(0, -2))

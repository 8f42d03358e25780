"""8-bit floats with scales: fine-grained FP8 (DeepSeek-V3, arXiv:2412.19437) and compressed-tensors' variant.

value = weight · scale. A scale belongs to a block of rows and columns, to a row, or to the weight; the last
blocks of a row, and those of the last rows, may be incomplete.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape, rows_and_columns
from offspec_kernels.dequant.scaled import check_scales, plain
from offspec_kernels.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Float8(Format):
    """float8_e4m3fn, whose 0x7F and 0xFF are NaN.

    block: rows and columns that share a scale, if `per` is "block". rounded: whether products are rounded
    to the dtype of the scales, as in compressed-tensors; else they are float32, as in transformers'
    fine-grained FP8.

    Parts of a weight [rows, columns]: weight float8_e4m3fn [rows, columns]; scale [1], [rows, 1], or
    [rows / block, columns / block] rounded up. Size-1 dimensions of scale may be missing. For experts in one
    weight [E, rows, columns], whose rows fill whole blocks, scale is [E, rows, 1] or [E, rows / block, …].
    """

    name = "fp8"
    squeezable_parts = ("scale",)
    block: tuple[int, int] | None
    per: Literal["tensor", "channel", "block"]
    scales: torch.dtype = torch.float32
    rounded: bool = True

    def __post_init__(self) -> None:
        if self.per not in ("tensor", "channel", "block"):
            raise ArgumentError("per", f"must be tensor, channel or block, not {self.per!r}")
        if (self.block is not None) != (self.per == "block"):
            raise ArgumentError("block", f"{self.block} cannot be combined with a scale per {self.per}")
        if self.block is not None and min(self.block) < 1:
            raise ArgumentError("block", f"must be numbers of rows and columns, not {self.block}")
        check_scales(self.scales)

    @property
    def by_rows(self) -> bool:
        return self.per == "channel"

    def parts(self, shape: Shape) -> dict[str, Part]:
        experts = shape[:1] if len(shape) == 3 and self.per != "tensor" else ()
        rows, columns = plain(shape[len(experts) :], self.name)
        high, wide = self.block_of((rows, columns))
        if experts and rows % high:
            raise ArgumentError(
                "shape", f"{rows} rows per expert are not a multiple of the block height {high}"
            )
        each = (1,) if self.per == "tensor" else (*experts, -(-rows // high), -(-columns // wide))
        return {"weight": Part(torch.float8_e4m3fn, shape), "scale": Part(self.scales, each)}

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        if len(shape) == 3:
            return self, dict.fromkeys(("weight", "scale"), (start, end))
        return Format.slice_rows(self, shape, start, end)

    def block_of(self, shape: Shape) -> tuple[int, int]:
        """Return the rows and columns that share a scale."""
        return self.block or (1 if self.per == "channel" else max(shape[0], 1), max(shape[1], 1))

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        rows, columns = rows_and_columns(shape)
        high, wide = self.block_of((rows, columns))
        dtype = self.scales if self.rounded else torch.float32
        scale = parts["scale"].view(-(-rows // high), -(-columns // wide)).to(dtype)
        scale = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        return (parts["weight"].view(rows, columns).to(dtype) * scale).float().view(shape)

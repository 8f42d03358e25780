"""AWQ (Lin et al. 2023, arXiv:2306.00978), as stored by AutoAWQ's GEMM version.

A weight is stored transposed: a word has 4 bits of each of 8 outputs, in the order 0, 2, 4, 6, 1, 3, 5, 7
from the lowest bits. Each group of inputs has a zero point, packed the same way, and a scale for every
output.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.dequant.scaled import check_groups, check_scales, plain, scaled, unpack
from offspec_kernels.errors import ArgumentError

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # position of each output in its word


@dataclass(frozen=True, slots=True)
class Awq(Format):
    """4-bit codes.

    group: number of inputs that share a scale. Parts of a weight [out, in], out a multiple of 8, in of group:
    qweight int32 [in, out / 8]; qzeros int32 [in / group, out / 8]; scales [in / group, out].
    """

    name = "awq int4"
    transposed = True
    group: int
    scales: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ArgumentError("group", f"must be a positive number of inputs, not {self.group}")
        check_scales(self.scales)

    def parts(self, shape: Shape) -> dict[str, Part]:
        out, inputs = plain(shape, self.name)
        check_groups(self.group, inputs)
        if out % 8:
            raise ArgumentError("shape", f"{out} rows are not a multiple of 8")
        return {
            "qweight": Part(torch.int32, (inputs, out // 8)),
            "qzeros": Part(torch.int32, (inputs // self.group, out // 8)),
            "scales": Part(self.scales, (inputs // self.group, out)),
        }

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes, zeros = (
            unpack(parts[name], 4, 1).unflatten(1, (-1, 8))[..., PLACES].flatten(1)
            for name in ("qweight", "qzeros")
        )
        scales = parts["scales"].repeat_interleave(self.group, 0)
        return scaled(codes - zeros.repeat_interleave(self.group, 0), scales).mT

    def column_multiple(self, shape: Shape) -> int:
        from offspec_kernels.dequant.avx512 import has_lookups

        return 2 if has_lookups() else 0

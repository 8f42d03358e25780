"""Codebooks of 16 values, scaled per block by the block's largest magnitude.

The 4-bit formats of bitsandbytes, NF4 and FP4 (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): value =
table[code] · absmax[block]. A weight is split into blocks in memory order, regardless of its rows. Byte j has
code 2 j in its high half, and code 2 j + 1 in its low half. Nested scales are themselves 8-bit codes:
absmax = nested_table[code] · nested_absmax[nested block] + nested_offset.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor

from offspec_kernels.dequant.codebook.tables import BLOCKS, TABLES, quantize, table_of
from offspec_kernels.dequant.format import Format, Part, Shape
from offspec_kernels.errors import ArgumentError

__all__ = ["Codebook", "quantize"]


@dataclass(frozen=True, slots=True)
class Codebook(Format):
    """4-bit codes in blocks of `block` weights; the last block may be shorter.

    Parts of a weight with n values, n even, in b blocks: codes uint8 [n / 2] or [n / 2, 1]; absmax [b], of
    the dtype `absmax`, or uint8 if nested; table float32 [16], optional: by default the table of `kind`. If
    nested is not 0, that many blocks share a nested one: nested_absmax float32 [ceil(b / nested)] and
    nested_table float32 [256], and nested_offset is added.

    dtype: dtype to which the library rounds values, float16 or bfloat16; None for float32.
    """

    kind: Literal["nf4", "fp4"] = "nf4"
    block: int = 64
    absmax: torch.dtype = torch.float32
    nested: int = 0
    nested_offset: float = 0.0
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        sizes = (torch.uint8,) if self.nested else (torch.float32, torch.float16)
        if self.kind not in TABLES:
            raise ArgumentError("kind", f"must be one of {tuple(TABLES)}, not {self.kind!r}")
        if self.block not in BLOCKS:
            raise ArgumentError("block", f"must be one of {BLOCKS}, not {self.block}")
        if self.nested < 0:
            raise ArgumentError("nested", f"must be 0 or a number of blocks, not {self.nested}")
        if self.absmax not in sizes:
            raise ArgumentError("absmax", f"the dtype must be one of {sizes}, not {self.absmax}")
        if self.dtype not in (None, torch.float32, torch.float16, torch.bfloat16):
            raise ArgumentError("dtype", f"must be a 16-bit or 32-bit float, not {self.dtype}")

    @property
    def name(self) -> str:
        return f"{self.kind}-b{self.block}"

    def slice_rows(
        self, shape: Shape, start: int, end: int
    ) -> tuple[Format, dict[str, tuple[int, int]]] | None:
        each = prod(shape[1:])
        if self.nested or not each or each % self.block:
            return None
        of_each = {"codes": each // 2, "absmax": each // self.block}
        return self, {name: (start * count, end * count) for name, count in of_each.items()}

    @property
    def base_format(self) -> Format:
        return replace(self, nested_offset=0.0)

    def parts(self, shape: Shape) -> dict[str, Part]:
        values = prod(shape)
        if values % 2:
            raise ArgumentError("shape", f"{values} values do not fill whole bytes")
        blocks = -(-values // self.block)
        made = {
            "codes": Part(torch.uint8, (values // 2,)),
            "absmax": Part(self.absmax, (blocks,)),
            "table": Part(torch.float32, (16,)),
        }
        if self.nested:
            made["nested_absmax"] = Part(torch.float32, (-(-blocks // self.nested),))
            made["nested_table"] = Part(torch.float32, (256,))
        return made

    def check(self, parts: Mapping[str, Part], shape: Shape) -> None:
        wanted, found = self.parts(shape), dict(parts)
        column = Part(torch.uint8, (*wanted["codes"].shape, 1))
        if found.get("codes") == column:
            found["codes"] = wanted["codes"]
        found.setdefault("table", wanted["table"])
        Format.check(self, found, shape)

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        codes = parts["codes"].view(-1)
        code = torch.stack([codes >> 4, codes & 15], 1).view(-1).int()
        sizes = self.sizes(parts).repeat_interleave(self.block)[: len(code)]
        values = self.table(parts)[code] * sizes
        return values.to(self.dtype or torch.float32).float().view(shape)

    def column_multiple(self, shape: Shape) -> int:
        from offspec_kernels.dequant.avx512 import has_lookups

        return self.block if has_lookups() else 0

    def table(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the values of codes, float32 [16]."""
        given = parts.get("table")
        return table_of(self.kind, parts["codes"].device) if given is None else given

    def sizes(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the scale of each block, float32 [b]."""
        if not self.nested:
            return parts["absmax"].float()
        sizes = parts["nested_table"][parts["absmax"].int()]
        sizes *= parts["nested_absmax"].repeat_interleave(self.nested)[: len(sizes)]
        return sizes.add_(self.nested_offset)

"""One scale per row: bitsandbytes' 8-bit format (LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339).

value = code · scale / 127, where the scale is the largest magnitude in the row. Computed as in bitsandbytes:
code · scale, rounded to float32, times the float32 nearest to 1 / 127.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offspec_kernels.dequant.format import Format, Part, Shape, rows_and_columns

STEP = 7.874015718698502e-3  # the float32 nearest to 1 / 127


@dataclass(frozen=True, slots=True)
class Int8Rows(Format):
    """Codes from -127 to 127.

    Parts of a weight [..., columns], rows = the product of all earlier dimensions: codes int8 [rows,
    columns]; scale float32 [rows].
    """

    name = "int8-rows"
    by_rows = True

    def parts(self, shape: Shape) -> dict[str, Part]:
        rows, columns = rows_and_columns(shape)
        return {"codes": Part(torch.int8, (rows, columns)), "scale": Part(torch.float32, (rows,))}

    def reference(self, parts: Mapping[str, Tensor], shape: Shape) -> Tensor:
        return (parts["codes"] * parts["scale"][:, None] * STEP).view(shape)

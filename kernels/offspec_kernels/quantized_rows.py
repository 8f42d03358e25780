"""Keys and values in 8 bits: integers with one scale for each row of a head.

Letters: KV key heads, S rows, D elements of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offspec_kernels.checks import FLOATS, check_dtype, check_rows, check_tensor

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows with the values codes[..., s, d] * scales[..., s], in float32, rounded once to `dtype`.

    Each row is quantized on its own, so its values do not depend on its place or its neighbours.

    Args:
        codes: [..., S, D] int8, from -127 to 127.
        scales: [..., S] float32.
        dtype: Dtype of the values.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> "QuantizedRows":
        """Quantize `values` [..., S, D] to nearest, mapping each row's largest magnitude to 127."""
        wide = values.float()
        scales = wide.abs().amax(dim=-1) / _LARGEST
        divisor = torch.where(scales > 0, scales, 1.0)
        return cls((wide / divisor[..., None]).round_().to(torch.int8), scales, values.dtype)

    def values(self) -> Tensor:
        """Return the values [..., S, D]. Workspace: the same shape in float32."""
        wide = self.codes.float()  # faster than int8 times float32
        return wide.mul_(self.scales[..., None]).to(self.dtype)

    def __getitem__(self, index: Any) -> "QuantizedRows":
        """Select heads or rows; `index` must not split a row."""
        return QuantizedRows(self.codes[index], self.scales[index], self.dtype)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device


Rows = Tensor | QuantizedRows


def check_row_values(name: str, rows: Rows) -> None:
    """Check that kernels can read the rows: dtypes, one device, contiguous rows and scales."""
    if isinstance(rows, Tensor):
        check_dtype(name, rows, FLOATS)
        check_rows(name, rows)
        return
    check_dtype(f"{name}.codes", rows.codes, [torch.int8])
    check_rows(f"{name}.codes", rows.codes)
    check_tensor(f"{name}.scales", rows.scales, rows.codes.shape[:-1], [torch.float32], rows.device)


def values_of(rows: Rows) -> Tensor:
    """Return the rows as a tensor, dequantized if necessary."""
    return rows if isinstance(rows, Tensor) else rows.values()

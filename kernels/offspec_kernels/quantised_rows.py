"""Keys and values in 8 bits: whole numbers, and one scale for each row of a head.

Letters: KV key heads, S rows, D numbers of a row.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offspec_kernels.checks import FLOATS, check_dtype, check_rows, check_tensor

_LARGEST = 127


@dataclass(frozen=True, slots=True)
class QuantisedRows:
    """Rows whose values are numbers[..., s, d] * scales[..., s] in float32, rounded once to `dtype`.

    A row is quantised by itself, so its values are the same wherever it lies and whatever lies beside it.

    Args:
        numbers: [..., S, D] int8, from -127 to 127.
        scales: [..., S] float32.
        dtype: Of the values.
    """

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @classmethod
    def of(cls, values: Tensor) -> "QuantisedRows":
        """The nearest to `values` [..., S, D], with each row's largest number as 127."""
        wide = values.float()
        scales = wide.abs().amax(dim=-1) / _LARGEST
        divisor = torch.where(scales > 0, scales, 1.0)
        return cls((wide / divisor[..., None]).round_().to(torch.int8), scales, values.dtype)

    def values(self) -> Tensor:
        """[..., S, D]. Scratch: the same in float32."""
        wide = self.numbers.float()  # quicker than int8 by float32
        return wide.mul_(self.scales[..., None]).to(self.dtype)

    def __getitem__(self, index: Any) -> "QuantisedRows":
        """Some heads or rows; `index` leaves the numbers of a row whole."""
        return QuantisedRows(self.numbers[index], self.scales[index], self.dtype)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device


Rows = Tensor | QuantisedRows


def check_row_values(name: str, rows: Rows) -> None:
    """That kernels can read them: dtypes, one device, and no gaps within a row or between scales."""
    if isinstance(rows, Tensor):
        check_dtype(name, rows, FLOATS)
        check_rows(name, rows)
        return
    check_dtype(f"{name}.numbers", rows.numbers, [torch.int8])
    check_rows(f"{name}.numbers", rows.numbers)
    check_tensor(f"{name}.scales", rows.scales, rows.numbers.shape[:-1], [torch.float32], rows.device)


def values_of(rows: Rows) -> Tensor:
    """Rows as they are computed with."""
    return rows if isinstance(rows, Tensor) else rows.values()

"""Products of a pass on a GPU, in tiles of one size: a library's depend on the number of rows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from offspec.model.activations import rows_as_columns
from offspec_kernels.backend import Backend
from offspec_kernels.row_linear import row_linear


class RowProducts(TorchFunctionMode):
    """While entered, products of rows [..., K] and one matrix are `row_linear`'s.

    path: Backend to use; None: what suits the device.
    """

    def __init__(self, path: Backend | None = None) -> None:
        super().__init__()
        self._path = path

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return self._linear(*args, **kwargs)
        if function is torch.addmm and not kwargs:  # of GPT-2's layers
            return self._linear(args[1], args[2].mT, args[0])
        products = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm)
        if function in products and not kwargs and args[1].dim() == 2:
            return self._linear(args[0], args[1].mT)
        if turned := rows_as_columns(function, args):
            return self._linear(*turned).mT
        return function(*args, **kwargs)

    def _linear(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return row_linear(rows, weight, bias, path=self._path).view(*input.shape[:-1], len(weight))

"""Products of a pass whose rows' bits do not depend on the number of rows, as a library's do.

On a GPU all of them, in tiles of one size. On a CPU those of linear modules and of experts in bfloat16, where
torch's own sum up a row in another order beside other numbers of rows: with a matrix unit (AMX).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from offspec.model.activations import rows_as_columns
from offspec.model.experts import is_experts
from offspec.model.patches import wrap
from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.row_linear import row_linear
from offspec_kernels.row_linear.blocks import replaces_torch


def has_row_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether linear modules and experts in this dtype are multiplied in blocks on a CPU."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and choose_backend(device) == "eager"
        and replaces_torch()
    )


def use_row_products(model: torch.nn.Module) -> None:
    """Have the linear modules and experts of `model` multiply by `row_linear`, wherever they run on a CPU."""
    for module in model.modules():
        if is_experts(module):
            module.row_products = True  # type: ignore[assignment]
        elif is_linear(module):
            wrap(module, _linear, module)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is torch's linear one, or GPT-2's, whose weight lies as [K, N]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (torch.nn.Linear, Conv1D)


def _linear(own: Callable[[torch.Tensor], torch.Tensor], module: Any, input: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return own(input)
    if type(module) is not torch.nn.Linear:
        weight = weight.mT
    rows = input.reshape(-1, input.shape[-1])
    return row_linear(rows, weight, module.bias).view(*input.shape[:-1], len(weight))


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

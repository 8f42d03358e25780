"""Functions and products in which a row's bits depend neither on its place nor on the number of rows.

torch computes SiLU, GELU and the sigmoid in vectors, and the remainder of each thread's share one value at a
time with a different formula. In float32, one value in 25 then differs in its last bit; for the exact GELU it
is one in three. The shares depend on the numbers of rows and of threads. So each call gets sizes at which
every share is a whole number of vectors.

`row_linear` computes the products: on a GPU all of them, in tiles of one size; on a CPU those of linear
modules and experts in bfloat16, because with a matrix unit (AMX) torch's order of summation depends on the
number of rows.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from offspec.model.experts import is_experts
from offspec.model.patches import wrap
from offspec.model.row_counts import RowCounts
from offspec.model.torch_functions import bypass_function_modes
from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.row_linear import row_linear
from offspec_kernels.row_linear.blocks import replaces_torch

VECTOR = 64  # maximum numbers that torch processes at once: two vectors of 32 bfloat16
_SHARE = 1 << 15  # numbers up to which torch uses one thread (at::internal::GRAIN_SIZE)
_ALONE = 1 << 14  # same limit for GELU, which uses all threads above it
_MODULES = ("torch.nn.modules.activation", "transformers.activations")

_BARE = (torch.sigmoid, torch.Tensor.sigmoid, F.sigmoid, F.softplus)
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_MATRIX_PRODUCTS = (*_PRODUCTS, torch.mm)

Function = Callable[[torch.Tensor], torch.Tensor]


def make_activations_row_independent(model: torch.nn.Module) -> None:
    """Make the activations of `model` run through `row_independent`."""
    for module in model.modules():
        leaf = not [*module.children(), *module.parameters()]
        if leaf and type(module).__module__ in _MODULES:
            wrap(module, row_independent)


def has_row_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether linear modules and experts of this dtype are multiplied in blocks on a CPU."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and choose_backend(device) == "eager"
        and replaces_torch()
    )


def use_row_products(model: torch.nn.Module) -> None:
    """Make the linear modules and experts of `model` multiply with `row_linear` when they run on a CPU."""
    for module in model.modules():
        if is_experts(module):
            module.row_products = True  # type: ignore[assignment]
        elif is_linear(module):
            wrap(module, _linear, module)


def is_linear(module: torch.nn.Module) -> bool:
    """Return whether a module is torch's linear module, or GPT-2's, whose weight is stored as [K, N]."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (torch.nn.Linear, Conv1D)


def _linear(own: Callable[[torch.Tensor], torch.Tensor], module: Any, input: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
        return own(input)
    return _product(input, weight if type(module) is torch.nn.Linear else weight.mT, module.bias)


def _product(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    path: Backend | None = None,
) -> torch.Tensor:
    """Multiply rows [..., K] by a matrix [N, K] with `row_linear`; return [..., N]."""
    rows = input.reshape(-1, input.shape[-1])
    return row_linear(rows, weight, bias, path=path).view(*input.shape[:-1], len(weight))


class RowIndependentFunctions(TorchFunctionMode):
    """Mode that makes functions row-independent that models call outside modules or at other row counts.

    These are the sigmoid and softplus of routers, products of cached latents, whose number varies, and
    products of a matrix with rows stored as columns.

    Args:
        row_counts: Row counts to which products are padded.
        row_blocks: Whether bfloat16 products use `row_linear`, whose rows are independent at any row count.
    """

    def __init__(self, row_counts: RowCounts, row_blocks: bool = False) -> None:
        super().__init__()
        self._row_counts, self._row_blocks = row_counts, row_blocks

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _BARE and len(args) == 1 and not kwargs:
            return row_independent(function, args[0])
        if function is F.linear and not kwargs:
            return self._linear(*args)
        if columns := _rows_as_columns(function, args):
            return self._linear(*columns).mT
        return function(*args, **kwargs)

    def _linear(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self._row_blocks and weight.dtype == torch.bfloat16 and weight.dim() == 2:
            return _product(rows, weight, bias)
        count = rows.numel() // max(rows.shape[-1], 1)
        missing = self._row_counts.padded(count) - count
        if not missing:
            return F.linear(rows, weight, bias)
        padded = F.pad(rows.reshape(count, -1), (0, 0, 0, missing))
        return F.linear(padded, weight, bias)[:count].view(*rows.shape[:-1], -1)


class RowProducts(TorchFunctionMode):
    """Mode that computes products of rows [..., K] and one matrix with `row_linear`.

    Args:
        path: Backend to use. Default: the device's default backend.
    """

    def __init__(self, path: Backend | None = None) -> None:
        super().__init__()
        self._path = path

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.linear:
            return _product(*args, **kwargs, path=self._path)
        if function is torch.addmm and not kwargs:  # used by GPT-2's layers
            return _product(args[1], args[2].mT, args[0], path=self._path)
        if function in _MATRIX_PRODUCTS and not kwargs and args[1].dim() == 2:
            return _product(args[0], args[1].mT, path=self._path)
        if columns := _rows_as_columns(function, args):
            return _product(*columns, path=self._path).mT
        return function(*args, **kwargs)


def _rows_as_columns(function: Any, args: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return rows [1, T, K] and weight [N, K] of a product written weight @ rows.mT; None for other calls."""
    if function not in _PRODUCTS or len(args) != 2 or (args[0].dim(), args[1].dim()) != (2, 3):
        return None
    return args[1].mT, args[0]


@bypass_function_modes
def row_independent(function: Function, values: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function to values [..., I] so that no result depends on its place."""
    if values.device.type != "cpu" or values.dim() == 0 or values.numel() == 0:
        return function(values)
    width = values.shape[-1]
    if width % VECTOR:
        return row_independent(function, F.pad(values, (0, -width % VECTOR)))[..., :width]
    flat = values.contiguous().view(-1)  # for strided tensors, another library computes the exact GELU
    pieces = [function(piece) for piece in _pieces(flat)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).view(values.shape)


def _pieces(flat: torch.Tensor) -> list[torch.Tensor]:
    """Split a multiple of VECTOR numbers so that every thread's share of a piece is also such a multiple."""
    count, threads = len(flat), torch.get_num_threads()
    if count <= _ALONE:
        return [flat]
    unit = VECTOR * math.lcm(threads, min(threads, -(-count // _SHARE)))
    most = count - count % unit
    if most == count:
        return [flat]
    if -(-most // _SHARE) != -(-count // _SHARE) or most == 0:  # would be split among fewer threads
        most = max(most // _ALONE, 1) * _ALONE
        return [*flat[:most].split(_ALONE), *_pieces(flat[most:])]
    return [flat[:most], *_pieces(flat[most:])]

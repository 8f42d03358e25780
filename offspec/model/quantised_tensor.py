"""Keys and values in 8 bits in the place of a tensor, for model code that knows nothing of them."""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from offspec_kernels.quantised_rows import QuantisedRows, Rows


class QuantisedTensor(torch.Tensor):
    """A tensor that has numbers and scales in the place of values.

    `stored_rows` gives them to attention, which reads them as they are. Any other operation is given the
    values, so that a family may do with keys what it likes: expand a latent, repeat heads, attend in a way of
    its own.
    """

    rows: QuantisedRows
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, rows: QuantisedRows) -> "QuantisedTensor":
        made: QuantisedTensor = torch.Tensor._make_wrapper_subclass(
            cls, rows.shape, dtype=rows.dtype, device=rows.device
        )
        made.rows = rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.rows.values(), (args, kwargs or {}))
        return function(*args, **kwargs)


def stored_rows(tensor: torch.Tensor) -> Rows:
    """What attention reads."""
    return tensor.rows if isinstance(tensor, QuantisedTensor) else tensor

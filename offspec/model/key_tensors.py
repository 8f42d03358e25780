"""Keys or values in the place of a tensor, on their way from a cache to attention through a family's code."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from offspec.core.errors import UnsupportedModelError
from offspec_kernels.quantised_rows import QuantisedRows, Rows


class _StandIn(torch.Tensor):
    """A tensor without values of its own, for what its class does with operations."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _of(cls, shape: Sequence[int], like: torch.Tensor | QuantisedRows) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        return made


class QuantisedTensor(_StandIn):
    """A tensor that has numbers and scales in 8 bits in the place of values.

    `stored_rows` gives them to attention, which reads them as they are. Any other operation is given the
    values, so that a family may do with keys what it likes: expand a latent, repeat heads, attend in a way of
    its own.
    """

    rows: QuantisedRows

    @staticmethod
    def __new__(cls, rows: QuantisedRows) -> "QuantisedTensor":
        made = cls._of(rows.shape, rows)
        made.rows = rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.rows.values(), (args, kwargs or {}))
        return function(*args, **kwargs)


class PartedTensor(_StandIn):
    """A tensor that has one [1, KV, S, D] for each sequence, with as many rows as all of them.

    `parts` are for attention, and may be copied to a device. Any other operation raises
    UnsupportedModelError: what a family does with keys in between is made for those of one sequence.
    """

    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor]) -> "PartedTensor":
        _, heads, _, width = parts[0].shape
        made = cls._of((1, heads, sum(part.shape[2] for part in parts), width), parts[0])
        made.parts = tuple(parts)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default:
            return cls([function(part, **(kwargs or {})) for part in args[0].parts])
        raise UnsupportedModelError("it computes with keys between its cache and its attention")


def stored_rows(tensor: torch.Tensor) -> Rows:
    """What attention reads."""
    return tensor.rows if isinstance(tensor, QuantisedTensor) else tensor


def parts_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each sequence what attention reads."""
    return tensor.parts if isinstance(tensor, PartedTensor) else (tensor,)

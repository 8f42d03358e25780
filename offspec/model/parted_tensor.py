"""Keys or values of several sequences in the place of a tensor, on their way from a cache to attention."""

from collections.abc import Sequence
from typing import Any

import torch

from offspec.core.errors import UnsupportedModelError


class PartedTensor(torch.Tensor):
    """A tensor that has one [1, KV, S, D] for each sequence, with as many rows as all of them.

    `parts` are for attention, and may be copied to a device. Any other operation raises
    UnsupportedModelError: what a family does with keys in between is made for those of one sequence.
    """

    parts: tuple[torch.Tensor, ...]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor]) -> "PartedTensor":
        _, heads, _, width = parts[0].shape
        shape = (1, heads, sum(part.shape[2] for part in parts), width)
        made: PartedTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=parts[0].dtype, device=parts[0].device
        )
        made.parts = tuple(parts)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._to_copy.default:
            return cls([function(part, **(kwargs or {})) for part in args[0].parts])
        raise UnsupportedModelError("it computes with keys between its cache and its attention")


def parts_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of each sequence what attention reads."""
    return tensor.parts if isinstance(tensor, PartedTensor) else (tensor,)

"""Tensor subclasses for keys and values that pass from a cache through a model's code to attention."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map_only

from offspec.core.errors import UnsupportedModelError
from offspec_kernels.quantized_rows import QuantizedRows, Rows


class _StandIn(torch.Tensor):
    """Wrapper tensor without storage; subclasses define how operations treat it."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def _of(cls, shape: Sequence[int], like: torch.Tensor | QuantizedRows) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        return made


class QuantizedTensor(_StandIn):
    """Tensor of 8-bit integers with scales.

    `stored_rows` passes them to attention, which reads them directly. Any other operation gets the
    dequantized values, so that a model may compute with keys: expand a latent, repeat heads, or use its own
    attention.
    """

    rows: QuantizedRows

    @staticmethod
    def __new__(cls, rows: QuantizedRows) -> "QuantizedTensor":
        made = cls._of(rows.shape, rows)
        made.rows = rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, lambda tensor: tensor.rows.values(), (args, kwargs or {}))
        return function(*args, **kwargs)


class PerSequenceTensor(_StandIn):
    """Tensor of several sequences' rows, with one part [1, KV, S, D] per sequence.

    Attention uses `parts`, and the tensor may be copied to a device. Any other operation raises
    UnsupportedModelError, because a model's own computation with keys assumes a single sequence.
    """

    parts: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor]) -> "PerSequenceTensor":
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
    """Return the stored rows of a tensor, as attention reads them."""
    return tensor.rows if isinstance(tensor, QuantizedTensor) else tensor


def parts_in(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensor of each sequence."""
    return tensor.parts if isinstance(tensor, PerSequenceTensor) else (tensor,)

"""Attention computed one sequence at a time, in layers that otherwise process the rows of all together.

Some model families transform keys before attending to them, for example by expanding a cached latent in each
pass. Attention then runs per sequence. The rest of the layer, mostly experts, still runs over the rows of
all.

Letters: T rows of a sequence, R rows of all sequences, followed by padding.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offspec.model.attention import MergedContext, TreeContext, current_context, pass_context
from offspec.model.cache import MergedCache, TreeCache
from offspec.model.pass_parts import map_rows
from offspec.model.patches import wrap
from offspec.model.row_counts import RowCounts

_CACHE = "past_key_values"  # parameter name in modules that use the KV cache


def attend_per_sequence(layer: torch.nn.Module, counts: RowCounts) -> None:
    """Make a layer's modules that take a KV cache run one sequence at a time.

    Args:
        layer: Decoder layer to change.
        counts: Row counts that the modules may run at.
    """
    for module in layer.modules():
        if module is not layer and _CACHE in inspect.signature(module.forward).parameters:
            wrap(module, _one_by_one, counts)


def _one_by_one(forward: Callable[..., Any], counts: RowCounts, /, *args: Any, **kwargs: Any) -> Any:
    context = current_context()
    if not isinstance(context, MergedContext):
        return forward(*args, **kwargs)
    rows = (args[0] if args else kwargs["hidden_states"]).shape[1]
    found, others = list[torch.Tensor](), list[Any]()
    for sequence, (own, place) in enumerate(context.pieces(rows)):
        count = place.stop - place.start
        call = _SequenceCall(sequence, own, place, counts.padded(count) - count, rows)
        out = call.run(forward, args, kwargs)
        others = [*out[1:]] if isinstance(out, tuple) else []
        found.append((out[0] if isinstance(out, tuple) else out)[:, :count])
    joined = torch.cat([*found, found[-1][:, -1:].expand(-1, context.padding, -1)], 1)
    return (joined, *others) if isinstance(out, tuple) else joined


@dataclass(frozen=True, slots=True)
class _SequenceCall:
    """Arguments of one sequence's call: its rows of the R, and how many copies of its last row pad them."""

    sequence: int
    context: TreeContext
    place: slice
    padding: int
    rows: int

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module on the sequence's rows, padded with copies of the last."""
        given = {name: self._own(value) for name, value in kwargs.items()}
        caches = [value for value in given.values() if isinstance(value, TreeCache)]
        padded: list[TreeContext | TreeCache] = [self.context, *caches]
        for one in padded:
            one.padding = self.padding
        try:
            with pass_context(self.context):
                return forward(*map(self._own, args), **given)
        finally:
            for one in padded:
                one.padding = 0

    def _own(self, value: Any) -> Any:
        if isinstance(value, MergedCache):
            return value.caches[self.sequence]
        if isinstance(value, MergedContext):
            return self.context
        return map_rows(value, self.rows, self._with_copies)

    def _with_copies(self, rows: torch.Tensor, dimension: int) -> torch.Tensor:
        own = rows.narrow(dimension, self.place.start, self.place.stop - self.place.start)
        last = own.narrow(dimension, own.shape[dimension] - 1, 1)
        return torch.cat([own, *[last] * self.padding], dimension) if self.padding else own

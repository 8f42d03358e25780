"""Attention that takes sequences one by one, in layers that take the rows of several together.

Some families do more with keys than attend to them: a latent that is cached, say, is expanded for each pass.
That is done for each sequence, and the rest of the layer, with experts most of it, over the rows of all.

Letters: T rows of a sequence, R rows of all with padding behind them.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offspec.model.attention import MergedContext, TreeContext, running, running_context
from offspec.model.cache import MergedCache, TreeCache
from offspec.model.pass_parts import map_rows
from offspec.model.patches import wrap
from offspec.model.row_counts import RowCounts

_CACHE = "past_key_values"  # as modules call it that keep keys


def take_apart(layer: torch.nn.Module, counts: RowCounts) -> None:
    """Have the modules of a layer that are given a cache of keys take sequences one by one.

    counts: what row counts they run at.
    """
    for module in layer.modules():
        if module is not layer and _CACHE in inspect.signature(module.forward).parameters:
            wrap(module, _one_by_one, counts)


def _one_by_one(forward: Callable[..., Any], counts: RowCounts, /, *args: Any, **kwargs: Any) -> Any:
    context = running_context()
    if not isinstance(context, MergedContext):
        return forward(*args, **kwargs)
    rows = (args[0] if args else kwargs["hidden_states"]).shape[1]
    found, beside = list[torch.Tensor](), list[Any]()
    for sequence, (own, place) in enumerate(context.pieces(rows)):
        count = place.stop - place.start
        turn = _Turn(sequence, own, place, counts.padded(count) - count, rows)
        out = turn.run(forward, args, kwargs)
        beside = [*out[1:]] if isinstance(out, tuple) else []
        found.append((out[0] if isinstance(out, tuple) else out)[:, :count])
    joined = torch.cat([*found, found[-1][:, -1:].expand(-1, context.padding, -1)], 1)
    return (joined, *beside) if isinstance(out, tuple) else joined


@dataclass(frozen=True, slots=True)
class _Turn:
    """Of one sequence: which of the R rows are its own, and how many copies of the last go with them."""

    sequence: int
    context: TreeContext
    place: slice
    padding: int
    rows: int

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module makes of the sequence's rows, with copies behind them."""
        given = {name: self._own(value) for name, value in kwargs.items()}
        caches = [value for value in given.values() if isinstance(value, TreeCache)]
        padded: list[TreeContext | TreeCache] = [self.context, *caches]
        for one in padded:
            one.padding = self.padding
        try:
            with running(self.context):
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

"""The caches of several sequences as one, for a layer through which their rows go together.

Letters: R rows of all sequences with padding behind them, KV key heads, D numbers of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch

from offspec.model.cache import TreeCache
from offspec.model.parted_tensor import PartedTensor
from offspec.model.recurrence.state import Recurrence
from offspec.model.recurrence.walks import HoldsStates


class MergedCache(HoldsStates):
    """Hands every sequence's rows to its own cache.

    What a layer else may ask of a cache has no one answer, and is not there.

    Args:
        caches: Of the sequences.
        places: Of each which rows are its own; what a layer appends behind them is padding.
    """

    def __init__(self, caches: Sequence[TreeCache], places: Sequence[slice]) -> None:
        self.caches, self._places = caches, places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows [1, KV, R, D]; all keys and all values of each sequence."""
        found = [
            cache.update(key_states[:, :, place], value_states[:, :, place], layer_idx)
            for cache, place in zip(self.caches, self._places, strict=True)
        ]
        keys, values = zip(*found, strict=True)
        return PartedTensor(keys), PartedTensor(values)

    def reached(self, layer: int, place: int) -> tuple[Recurrence, ...]:
        return tuple(found for cache in self.caches for found in cache.reached(layer, place))

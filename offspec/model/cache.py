"""Keys and values of the committed prefix, with a token tree appended behind it.

Letters: L committed positions, T new rows of a pass (P pending prompt tokens, then a tree), C capacity.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [1, KV, C, D] each, allocated once and filled from the left.

    `filled` rows are valid; the committed prefix comes first. Sliding-window layers keep all rows: the
    window is the attention mask's business, because a tree may be rewound to before it.
    """

    is_sliding = False

    def __init__(self, capacity: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.filled = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._room(key_states)
        self.values = self._room(value_states)
        self.is_initialized = True

    def _room(self, like: torch.Tensor) -> torch.Tensor:
        batch, heads, _, size = like.shape
        return torch.empty(batch, heads, self.capacity, size, dtype=like.dtype, device=like.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows [1, KV, T, D] of a chunk; returns all valid rows [1, KV, filled + T, D]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        end = self.filled + key_states.shape[2]
        if end > self.capacity:
            self.reserve(end)
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping what is there."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = self._room(old)
                new[:, :, : self.filled] = old[:, :, : self.filled]
                setattr(self, name, new)

    def keep(self, length: int, rows: torch.Tensor) -> None:
        """Keep `length` rows and, right behind them, the given later rows [K] in order; drop the rest."""
        if len(rows):
            for store in (self.keys, self.values):
                if store is not None:
                    store[:, :, length : length + len(rows)] = store[:, :, rows.to(store.device)]
        self.filled = length + len(rows)

    def get_seq_length(self) -> int:
        return self.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_max_length(self) -> int:
        return -1


class TreeCache(Cache):
    """The cache of a whole model. `length` counts committed positions; rows behind them are a tree's."""

    def __init__(self, layers: int, capacity: int) -> None:
        self.rows = [TreeCacheLayer(capacity) for _ in range(layers)]
        super().__init__(layers=[*self.rows])
        self.length = 0

    def commit(self, pending: int, nodes: Sequence[int]) -> None:
        """Commit `pending` rows in order, then the rows of `nodes` (counted from behind the pending ones).

        Every other uncommitted row is dropped. Rows must be ascending, which a path down a tree is.
        """
        start = self.length + pending
        rows = torch.tensor([start + node for node in nodes], dtype=torch.long)
        for layer in self.rows:
            layer.keep(start, rows)
        self.length = start + len(nodes)

    def rewind(self, length: int) -> None:
        """Go back to `length` committed positions, dropping everything behind them."""
        assert 0 <= length <= self.length
        for layer in self.rows:
            layer.filled = length
        self.length = length

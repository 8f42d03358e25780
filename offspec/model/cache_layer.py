"""One layer's keys and values, with a token tree's behind those of the committed prefix.

Letters: B sequences (1, but where texts are written), KV key heads, C capacity, T new rows, D numbers of a
row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from offspec.model.cache_block import CacheBlock
from offspec.model.key_tensors import QuantisedTensor
from offspec_kernels.kv_compact import KVTable
from offspec_kernels.quantised_rows import QuantisedRows


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [1, KV, C, D] each, taken from a block once and filled from the left.

    `filled` rows are valid; the committed prefix comes first. Sliding-window layers keep all rows: the
    window is the attention mask's business, because a tree may be rewound to before it. A layer that selects
    keys by an index has the index's own keys, [1, 1, C, D], of which `indexed` rows are valid.
    """

    is_sliding = False

    _NAMES: tuple[str, ...] = ("keys", "values", "index_keys")

    _dtype = torch.float32  # of keys and values where they are kept in fewer bits
    padding = 0  # of the rows that are appended, so many at the end are not kept

    def __init__(self, capacity: int, tables: list[KVTable], block: CacheBlock) -> None:
        """`tables` say where layers lie, and keep them alive: it is emptied when this one is to move."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self._tables, self._block = tables, block
        self.filled = self.indexed = 0
        self.index_keys: torch.Tensor | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._tables.clear()
        self._take(key_states, value_states)
        self.is_initialized = True

    def _take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Room for rows like these."""
        self.keys = self._block.take(key_states, self.capacity)
        self.values = self._block.take(value_states, self.capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows [B, KV, T, D] of a chunk, without padding; returns all [B, KV, filled + T, D]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[2] - self.padding
        start, end = self.filled, self.filled + rows
        self._make_room(end)
        self._write(start, end, key_states[:, :, :rows], value_states[:, :, :rows])
        self.filled = end
        return self._read(0, end)

    def _make_room(self, rows: int) -> None:
        if rows > self.capacity:
            self.reserve(max(rows, 2 * self.capacity))

    def _write(self, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert self.keys is not None and self.values is not None
        self.keys[:, :, start:end] = keys
        self.values[:, :, start:end] = values

    def _read(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys[:, :, start:end], self.values[:, :, start:end]

    def between(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Keys, values and the index's keys of these rows; nothing where the layer keeps none."""
        found = () if self.keys is None else self._read(start, end)
        return found if self.index_keys is None else (*found, self.index_keys[:, :, start:end])

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Append the index's keys [1, T, D] of a chunk, without padding; returns all [1, indexed + T, D]."""
        rows = states.shape[1] - self.padding
        end = self.indexed + rows
        self._make_room(end)
        if self.index_keys is None:
            self._tables.clear()
            self.index_keys = self._block.take(states[:, None], self.capacity)
        self.index_keys[0, :, self.indexed : end] = states[:, :rows]
        self.indexed = end
        return self.index_keys[0, :, :end]

    @property
    def named_stores(self) -> dict[str, torch.Tensor]:
        """All that is kept of rows, by name, each [B, heads, C, numbers]."""
        return {name: store for name in self._NAMES if (store := getattr(self, name)) is not None}

    @property
    def stores(self) -> list[torch.Tensor]:
        """The same without names."""
        return [*self.named_stores.values()]

    def hold(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """The stores by name, with room for `rows` rows, to be written from the left; `cut` then counts them.

        Args:
            like: By name, [1, heads, n, numbers] of what each store is to hold, where the layer is computed.
            rows: That are to be written.
            dtype: Of keys and values, in whatever form they are kept.
        """
        self.reserve(rows)
        for name, store in like.items():
            if getattr(self, name) is None:
                self._tables.clear()
                setattr(self, name, self._block.take(store, self.capacity))
        self.is_initialized = True
        return self.named_stores

    def take_over(self, other: "TreeCacheLayer", rows: int) -> None:
        """Hold the first rows of another cache's layer, in the form that they are kept in."""
        theirs = other.named_stores
        for name, store in self.hold(theirs, rows, other._dtype).items():
            store[:, :, :rows] = theirs[name][:, :, :rows]

    def cut(self, length: int) -> None:
        """Drop all rows from `length` on."""
        self.filled = self.indexed = length

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping what is there: outside the block, a tensor at a time."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        self._tables.clear()
        for name in self._NAMES:
            if (old := getattr(self, name)) is not None:
                new = old.new_empty(*old.shape[:2], capacity, old.shape[3])
                filled = max(self.filled, self.indexed)
                new[:, :, :filled] = old[:, :, :filled]
                setattr(self, name, new)

    def get_seq_length(self) -> int:
        return self.filled

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.filled + query_length, 0

    def get_max_length(self) -> int:
        return -1


class Int8CacheLayer(TreeCacheLayer):
    """The same in 8 bits: whole numbers, and beside them scales [B, KV, C, 1] in float32.

    Rows are quantised as they are written, and never read otherwise, not even by the pass that made them.
    So a key is the same in a tree, in a chunk of a prompt and in the prefix. Keys of an index are kept whole.
    """

    _NAMES = (*TreeCacheLayer._NAMES, "key_scales", "value_scales")
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def _take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._dtype = key_states.dtype
        for name, states in (("key", key_states), ("value", value_states)):
            rows = QuantisedRows.of(states[:, :, :1])
            setattr(self, f"{name}s", self._block.take(rows.numbers, self.capacity))
            setattr(self, f"{name}_scales", self._block.take(rows.scales[..., None], self.capacity))

    def hold(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        self._dtype = dtype
        return super().hold(like, rows, dtype)

    def _write(self, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for stored, states in zip(self._quantised(start, end), (keys, values), strict=True):
            rows = QuantisedRows.of(states)
            stored.numbers.copy_(rows.numbers)
            stored.scales.copy_(rows.scales)

    def _read(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = map(QuantisedTensor, self._quantised(start, end))
        return keys, values

    def _quantised(self, start: int, end: int) -> tuple[QuantisedRows, QuantisedRows]:
        assert self.keys is not None and self.key_scales is not None
        assert self.values is not None and self.value_scales is not None
        keys = QuantisedRows(self.keys, self.key_scales[..., 0], self._dtype)
        values = QuantisedRows(self.values, self.value_scales[..., 0], self._dtype)
        return keys[:, :, start:end], values[:, :, start:end]

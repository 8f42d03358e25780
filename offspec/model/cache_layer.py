"""KV cache of one layer: rows of the committed prefix, followed by those of a token tree.

Letters: B sequences (1, except when texts are generated in a batch), KV key heads, C capacity, T new rows, D
numbers of a row.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from offspec.model.cache_block import CacheBlock
from offspec.model.kv_tensors import QuantizedTensor
from offspec_kernels.kv_compact import KVTable
from offspec_kernels.quantized_rows import QuantizedRows


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one layer, [1, KV, C, D] each, taken from a block once and filled from the left.

    The first `filled` rows are valid, the committed prefix first. Sliding-window layers also keep all rows,
    and the attention mask applies the window, because a rewind may go back beyond it. A layer that selects
    keys by an index also stores the index's keys, [1, 1, C, D], with `indexed` valid rows.
    """

    is_sliding = False

    _NAMES: tuple[str, ...] = ("keys", "values", "index_keys")

    _dtype = torch.float32  # compute dtype of keys and values stored in fewer bits
    padding = 0  # number of rows at the end of each appended chunk that are not stored

    def __init__(self, capacity: int, tables: list[KVTable], block: CacheBlock) -> None:
        """Create an empty layer. `tables` refer to all layers' stores and are cleared if a store moves."""
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
        """Allocate stores for rows of this shape and dtype."""
        self.keys = self._block.take(key_states, self.capacity)
        self.values = self._block.take(value_states, self.capacity)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows [B, KV, T, D] of a chunk, except padding; return all [B, KV, filled + T, D]."""
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

    def read_rows(self, start: int, end: int) -> tuple[torch.Tensor, ...]:
        """Return keys, values and index keys of rows `start` to `end`, without those that are not stored."""
        found = () if self.keys is None else self._read(start, end)
        return found if self.index_keys is None else (*found, self.index_keys[:, :, start:end])

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Append the index keys [1, T, D] of a chunk, except padding; return all [1, indexed + T, D]."""
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
        """All stores by name, each [B, heads, C, numbers]."""
        return {name: store for name in self._NAMES if (store := getattr(self, name)) is not None}

    @property
    def stores(self) -> list[torch.Tensor]:
        """All stores without their names."""
        return [*self.named_stores.values()]

    def allocate_like(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        """Return stores by name with capacity for `rows` rows, to be written from the left.

        Call `truncate` after writing, to set the number of rows.

        Args:
            like: By name, a tensor [1, heads, n, numbers] with each store's heads, numbers and dtype, on the
                layer's compute device.
            rows: Number of rows to be written.
            dtype: Compute dtype of keys and values, whatever their storage format.
        """
        self.reserve(rows)
        for name, store in like.items():
            if getattr(self, name) is None:
                self._tables.clear()
                setattr(self, name, self._block.take(store, self.capacity))
        self.is_initialized = True
        return self.named_stores

    def copy_prefix(self, other: "TreeCacheLayer", rows: int) -> None:
        """Copy the first rows of another cache's layer in their storage format."""
        theirs = other.named_stores
        for name, store in self.allocate_like(theirs, rows, other._dtype).items():
            store[:, :, :rows] = theirs[name][:, :, :rows]

    def truncate(self, length: int) -> None:
        """Drop all rows from `length` on."""
        self.filled = self.indexed = length

    def reserve(self, capacity: int) -> None:
        """Grow to `capacity` rows, keeping the contents: outside the block, one store at a time."""
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
    """Keys and values of one layer in 8 bits: integers, with scales [B, KV, C, 1] in float32.

    Rows are quantized when written, and even the pass that made them reads the quantized values. So a key is
    the same in a tree, in a chunk of a prompt and in the prefix. Index keys are not quantized.
    """

    _NAMES = (*TreeCacheLayer._NAMES, "key_scales", "value_scales")
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    def _take(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._dtype = key_states.dtype
        for name, states in (("key", key_states), ("value", value_states)):
            rows = QuantizedRows.of(states[:, :, :1])
            setattr(self, f"{name}s", self._block.take(rows.codes, self.capacity))
            setattr(self, f"{name}_scales", self._block.take(rows.scales[..., None], self.capacity))

    def allocate_like(
        self, like: Mapping[str, torch.Tensor], rows: int, dtype: torch.dtype
    ) -> Mapping[str, torch.Tensor]:
        self._dtype = dtype
        return super().allocate_like(like, rows, dtype)

    def _write(self, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        for stored, states in zip(self._quantized_rows(start, end), (keys, values), strict=True):
            rows = QuantizedRows.of(states)
            stored.codes.copy_(rows.codes)
            stored.scales.copy_(rows.scales)

    def _read(self, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = map(QuantizedTensor, self._quantized_rows(start, end))
        return keys, values

    def _quantized_rows(self, start: int, end: int) -> tuple[QuantizedRows, QuantizedRows]:
        assert self.keys is not None and self.key_scales is not None
        assert self.values is not None and self.value_scales is not None
        keys = QuantizedRows(self.keys, self.key_scales[..., 0], self._dtype)
        values = QuantizedRows(self.values, self.value_scales[..., 0], self._dtype)
        return keys[:, :, start:end], values[:, :, start:end]

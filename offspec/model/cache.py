"""Keys and values of the committed prefix, with a token tree appended behind it.

Letters: L committed positions, T new rows of a pass (P pending prompt tokens, then a tree), C capacity.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from offspec.model.cache_block import CacheBlock
from offspec.model.recurrence.functions import reach
from offspec.model.recurrence.snapshots import SPACING, Place, Snapshot, Snapshots
from offspec.model.recurrence.state import Committed, Recurrence
from offspec_kernels.kv_compact import KVTable, kv_compact

# [1, KV, n, D] each, of n positions: keys, values, and where a layer has an index, its keys [1, 1, n, D].
KeysAndValues = tuple[torch.Tensor, ...]


_WORTH_IT = 16  # positions that it takes a snapshot to be saved


class TreeCacheLayer(CacheLayerMixin):
    """One layer's keys and values, [1, KV, C, D] each, taken from a block once and filled from the left.

    `filled` rows are valid; the committed prefix comes first. Sliding-window layers keep all rows: the
    window is the attention mask's business, because a tree may be rewound to before it. A layer that selects
    keys by an index has the index's own keys, [1, 1, C, D], of which `indexed` rows are valid.
    """

    is_sliding = False

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
        self.keys = self._block.take(key_states, self.capacity)
        self.values = self._block.take(value_states, self.capacity)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the rows [1, KV, T, D] of a chunk, without padding; returns all [1, KV, filled + T, D]."""
        if self.keys is None or self.values is None:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[2] - self.padding
        end = self.filled + rows
        if end > self.capacity:
            self.reserve(max(end, 2 * self.capacity))
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.filled : end] = key_states[:, :, :rows]
        self.values[:, :, self.filled : end] = value_states[:, :, :rows]
        self.filled = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def update_indexer(self, states: torch.Tensor) -> torch.Tensor:
        """Append the index's keys [1, T, D] of a chunk, without padding; returns all [1, indexed + T, D]."""
        rows = states.shape[1] - self.padding
        end = self.indexed + rows
        if end > self.capacity:
            self.reserve(max(end, 2 * self.capacity))
        if self.index_keys is None:
            self._tables.clear()
            self.index_keys = self._block.take(states[:, None], self.capacity)
        self.index_keys[0, :, self.indexed : end] = states[:, :rows]
        self.indexed = end
        return self.index_keys[0, :, :end]

    @property
    def stores(self) -> list[torch.Tensor]:
        """What there is of keys, values and the index's keys."""
        every = (self.keys, self.values, self.index_keys)
        return [store for store in every if store is not None]

    def cut(self, length: int) -> None:
        """Drop all rows from `length` on."""
        self.filled = self.indexed = length

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` rows, keeping what is there: outside the block, a tensor at a time."""
        if capacity <= self.capacity:
            return
        self.capacity = capacity
        self._tables.clear()
        for name in ("keys", "values", "index_keys"):
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


class TreeCache(Cache):
    """The cache of a whole model. `length` counts committed positions; rows behind them are a tree's.

    recurrences: of layers that carry a state, by layer and by place in it; they come when they are asked for.
    block: memory for the rows of all layers; None: each allocates its own.
    """

    def __init__(self, layers: int, capacity: int, block: CacheBlock | None = None) -> None:
        self.recurrences: dict[Place, Recurrence] = {}
        self.snapshots = Snapshots()
        self._tables: list[KVTable] = []  # one at most, shared with the layers
        self.block = block or CacheBlock()
        self.rows = [TreeCacheLayer(capacity, self._tables, self.block) for _ in range(layers)]
        super().__init__(layers=[*self.rows])
        self.length = 0
        self._broken_off = False  # within a commit or a rewind, when states and positions may not agree

    @property
    def padding(self) -> int:
        """Rows at the end of those that a layer appends now that are not kept."""
        return self.rows[0].padding if self.rows else 0

    @padding.setter
    def padding(self, rows: int) -> None:
        if rows != self.padding:
            for layer in self.rows:
                layer.padding = rows

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Of each layer the numbers that a position takes, keys and values together."""
        return tuple(sum(store.shape[1] * store.shape[3] for store in row.stores) for row in self.rows)

    def commit(self, pending: int, nodes: Sequence[int]) -> None:
        """Commit `pending` rows in order, then the rows of `nodes` (counted from behind the pending ones).

        Every other uncommitted row is dropped. Rows must be ascending, which a path down a tree is.
        """
        start = self.length + pending
        self._broken_off = True
        self._commit_states(pending, nodes)
        if nodes and not self._tables:
            stores = [store for layer in self.rows for store in layer.stores]
            self._tables += [KVTable(stores)] if stores else []
        if nodes and self._tables:
            kv_compact(self._tables[0], start, [start + node for node in nodes])
        self.length = start + len(nodes)
        self._broken_off = False
        for layer in self.rows:
            layer.cut(self.length)

    def committed(self, start: int) -> list[KeysAndValues | None]:
        """Of each layer the committed positions from `start` on; None of a layer that holds nothing."""
        return [tuple(store[:, :, start : self.length] for store in row.stores) or None for row in self.rows]

    def adopt(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        """Take over, as committed, what another cache has from `start` on, in the place of what is there."""
        for layer, found in zip(self.rows, layers, strict=True):
            if found is not None:
                layer.cut(start)
                layer.update(*found[:2])
                for keys in found[2:]:
                    layer.update_indexer(keys[:, 0])
                self.length = layer.filled

    def rewind(self, length: int) -> int:
        """Go back to at most `length` committed positions, dropping all behind them; how many are left.

        Where layers carry a state, these are those of the nearest snapshot.
        """
        assert 0 <= length <= self.length
        for recurrence in self.recurrences.values():
            recurrence.drop()
        if self.recurrences and (length < self.length or self._broken_off):
            self._broken_off = True
            snapshot = self.snapshots.nearest(length)
            length = snapshot.length if snapshot else 0
            for place, recurrence in self.recurrences.items():
                found = snapshot.states.get(place) if snapshot else None
                recurrence.committed = found.copy() if found else Committed()
        for layer in self.rows:
            layer.cut(length)
        self.length = length
        self._broken_off = False
        return length

    def adopt_states(self, other: "TreeCache") -> None:
        """Take over the states of another cache of the same model, and with them its number of positions."""
        self.length = other.length  # also where no layer has keys and values
        for place, recurrence in other.recurrences.items():
            self._recurrence(*place).committed = recurrence.committed.copy()

    def _commit_states(self, pending: int, nodes: Sequence[int]) -> None:
        if not self.recurrences:
            return
        before = {place: recurrence.commit_text() for place, recurrence in self.recurrences.items()}
        start = self.length + pending
        if start - self.snapshots.newest >= _WORTH_IT and pending >= _WORTH_IT:
            if self.length:
                self.snapshots.add(Snapshot(self.length, {p: state for p, state in before.items() if state}))
            self.snapshots.add(self._snapshot(start))
        for recurrence in self.recurrences.values():
            recurrence.commit_rows(nodes)
        end = start + len(nodes)
        if end - self.snapshots.newest >= SPACING:
            self.snapshots.add(self._snapshot(end))

    def _snapshot(self, length: int) -> Snapshot:
        return Snapshot(length, {place: found.committed.copy() for place, found in self.recurrences.items()})

    def _recurrence(self, layer: int, place: int) -> Recurrence:
        return self.recurrences.setdefault((layer, place), Recurrence())

    # What families ask of their cache: the state is ours, and they are told that there is none yet.

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        reach(self._recurrence(layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        reach(self._recurrence(layer_idx, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        reach(self._recurrence(layer_idx, state_idx))
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return recurrent_states

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

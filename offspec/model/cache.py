"""KV cache of the committed prefix, followed by the rows of a token tree.

Letters: L committed positions, T new rows of a pass (P pending prompt tokens, then a tree), C capacity, R
rows of several sequences followed by padding, KV key heads, D numbers of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from offspec.model.cache_block import CacheBlock
from offspec.model.cache_layer import Int8CacheLayer, TreeCacheLayer
from offspec.model.cache_offload import CacheOffload, OffloadedInt8Layer, OffloadedLayer
from offspec.model.kv_tensors import PerSequenceTensor
from offspec.model.recurrence.snapshots import SPACING, Place, Snapshot, Snapshots
from offspec.model.recurrence.state import Recurrence, RecurrentState
from offspec.model.recurrence.state_cache import RecurrentStateCache
from offspec_kernels.kv_compact import KVTable, kv_compact

# Of n positions: keys and values, [1, KV, n, D] each, and the keys [1, 1, n, D] of a layer's index, if any.
KeysAndValues = tuple[torch.Tensor, ...]
_WORTH_IT = 16  # minimum positions between snapshots


class TreeCache(RecurrentStateCache, Cache):
    """Cache of a whole model. `length` counts committed positions; later rows belong to a tree.

    `recurrences` are the states of recurrent layers, by layer and place within the layer, created on first
    use.

    Args:
        layers: Number of decoder layers.
        capacity: C, rows for which each layer allocates memory at first.
        block: Memory for the rows of all layers. Default: each tensor has its own allocation.
        int8: Whether keys and values are stored in 8 bits.
        windows: Offload buffers on the device, if the block is in RAM.
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        block: CacheBlock | None = None,
        *,
        int8: bool = False,
        windows: CacheOffload | None = None,
    ) -> None:
        self.recurrences: dict[Place, Recurrence] = {}
        self.snapshots = Snapshots()
        self._tables: list[KVTable] = []  # one for each device, shared with the layers
        self.block = block or CacheBlock()
        self._windows = windows
        self._capacity, self._int8 = capacity, int8
        self.rows = [self._layer(capacity, int8) for _ in range(layers)]
        super().__init__(layers=[*self.rows])
        self.length = 0
        self._broken_off = False  # during a commit or rewind, when states and positions may be inconsistent

    def empty_copy(self) -> "TreeCache":
        """Return an empty cache with this one's settings and its own memory, for another sequence."""
        block = self.block.empty_copy()
        cache = TreeCache(len(self.rows), self._capacity, block, int8=self._int8, windows=self._windows)
        cache.snapshots.most = self.snapshots.most
        return cache

    def _layer(self, capacity: int, int8: bool) -> TreeCacheLayer:
        if self._windows is not None:
            apart = OffloadedInt8Layer if int8 else OffloadedLayer
            return apart(capacity, self._tables, self.block, self._windows)
        kind = Int8CacheLayer if int8 else TreeCacheLayer
        return kind(capacity, self._tables, self.block)

    @property
    def padding(self) -> int:
        """Number of rows at the end of each layer's appended rows that are not stored."""
        return self.rows[0].padding if self.rows else 0

    @padding.setter
    def padding(self, rows: int) -> None:
        if rows != self.padding:
            for layer in self.rows:
                layer.padding = rows

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Numbers stored per position in each layer, keys and values together."""
        return tuple(sum(store.shape[1] * store.shape[3] for store in row.stores) for row in self.rows)

    def commit(self, pending: int, nodes: Sequence[int]) -> None:
        """Commit `pending` rows in order, then the rows of `nodes`, counted from the end of the pending rows.

        All other uncommitted rows are dropped. Nodes must be ascending, as those of a path down a tree are.
        """
        start = self.length + pending
        self._broken_off = True
        self._commit_states(pending, nodes)
        if nodes and not self._tables:
            stores = [store for layer in self.rows for store in layer.stores]
            devices = dict.fromkeys(store.device for store in stores)
            self._tables += [KVTable([s for s in stores if s.device == device]) for device in devices]
        if nodes:
            self.settle()
        for table in self._tables if nodes else ():
            kv_compact(table, start, [start + node for node in nodes])
        self.length = start + len(nodes)
        self._broken_off = False
        for layer in self.rows:
            layer.truncate(self.length)

    def committed(self, start: int) -> list[KeysAndValues | None]:
        """Return each layer's committed rows from `start` on, or None for a layer that stores nothing."""
        return [row.read_rows(start, self.length) or None for row in self.rows]

    def append_committed(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        """Replace the rows from `start` on with another cache's, as committed rows."""
        for layer, found in zip(self.rows, layers, strict=True):
            if found is not None:
                layer.truncate(start)
                layer.update(*found[:2])
                for keys in found[2:]:
                    layer.update_indexer(keys[:, 0])
                self.length = layer.filled

    def rewind(self, length: int) -> int:
        """Drop all but at most `length` committed positions; return how many are left.

        With recurrent layers, these are the positions of the nearest earlier snapshot.
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
                recurrence.committed = found.copy() if found else RecurrentState()
        for layer in self.rows:
            layer.truncate(length)
        self.length = length
        self._broken_off = False
        return length

    def settle(self) -> None:
        """Wait until all rows have been copied to their stores."""
        if self._windows is not None:
            self._windows.settle()

    def close(self) -> None:
        """Wait for copies from and to the cache to end, then release resources other than memory."""
        try:
            if self._windows is not None:
                self._windows.finish()
        finally:
            self.block.close()

    def reusable(self, shared: int) -> int:
        """Return how many positions `rewind(shared)` would leave."""
        if not self.recurrences or shared == self.length:
            return shared
        return max((length for length in self.snapshots.lengths if length <= shared), default=0)

    def states(self) -> list[Snapshot]:
        """Return the available state snapshots, ascending by length, with the committed states last."""
        if not self.recurrences:
            return []
        earlier = [snapshot for snapshot in self.snapshots.kept if snapshot.length < self.length]
        return [*earlier, self._snapshot(self.length)]

    def drop(self) -> None:
        """Empty the cache before its stores are written from outside. `resume` makes it usable again."""
        self._broken_off, self.length = True, 0
        for layer in self.rows:
            layer.truncate(0)

    def resume(self, length: int, states: Sequence[Snapshot]) -> None:
        """Mark `length` rows written to the stores as committed.

        Args:
            length: Number of rows.
            states: Snapshots as returned by `states`.
        """
        for recurrence in self.recurrences.values():
            recurrence.drop()
            recurrence.committed = RecurrentState()
        self.snapshots = Snapshots(self.snapshots.most)
        for snapshot in states[:-1]:
            self.snapshots.add(snapshot)
        for place, found in states[-1].states.items() if states else ():
            self._recurrence(*place).committed = found
        for layer in self.rows:
            layer.truncate(length)
        self.length = length
        self._broken_off = False

    def copy_prefix(self, other: "TreeCache", length: int) -> int:
        """Replace the contents with at most the first `length` positions of another cache of the same model.

        With recurrent layers, these are the positions of the nearest earlier snapshot. Returns how many
        positions were copied and committed.
        """
        other.settle()
        length = other.reusable(length)
        states = [*other.states()]
        while states and states[-1].length > length:
            states.pop()
        states += [state.copy() for state in states[-1:]]
        self.drop()
        for mine, its in zip(self.rows, other.rows, strict=True):
            mine.copy_prefix(its, length)
        self.resume(length, states)
        return length

    def copy_states(self, other: "TreeCache") -> None:
        """Copy the recurrent states of another cache of the same model, and its number of positions."""
        self.length = other.length  # even if no layer has keys and values
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

    def recurrences_at(self, layer: int, place: int) -> tuple[Recurrence]:
        return (self._recurrence(layer, place),)


class MergedCache(RecurrentStateCache):
    """Caches of several sequences as one, for a layer that processes their rows together.

    Other cache methods that a layer may call have no single result for several sequences and are not
    implemented.

    Args:
        caches: Cache of each sequence.
        places: Rows of each sequence. Rows that a layer appends after these are padding.
    """

    def __init__(self, caches: Sequence[TreeCache], places: Sequence[slice]) -> None:
        self.caches, self._places = caches, places

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append rows [1, KV, R, D], padding last; return all keys and all values of each sequence."""
        found = [
            cache.update(key_states[:, :, place], value_states[:, :, place], layer_idx)
            for cache, place in zip(self.caches, self._places, strict=True)
        ]
        keys, values = zip(*found, strict=True)
        return PerSequenceTensor(keys), PerSequenceTensor(values)

    def recurrences_at(self, layer: int, place: int) -> tuple[Recurrence, ...]:
        return tuple(found for cache in self.caches for found in cache.recurrences_at(layer, place))

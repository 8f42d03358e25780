"""Keys and values of the committed prefix, with a token tree appended behind it.

Letters: L committed positions, T new rows of a pass (P pending prompt tokens, then a tree), C capacity, R
rows of several sequences with padding behind them, KV key heads, D numbers of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache

from offspec.model.cache_block import CacheBlock
from offspec.model.cache_layer import Int8CacheLayer, TreeCacheLayer
from offspec.model.cache_windows import CacheWindows, WindowedInt8Layer, WindowedLayer
from offspec.model.key_tensors import PartedTensor
from offspec.model.recurrence.snapshots import SPACING, Place, Snapshot, Snapshots
from offspec.model.recurrence.state import Committed, Recurrence
from offspec.model.recurrence.walks import HoldsStates
from offspec_kernels.kv_compact import KVTable, kv_compact

# [1, KV, n, D] each, of n positions: keys, values, and where a layer has an index, its keys [1, 1, n, D].
KeysAndValues = tuple[torch.Tensor, ...]
_WORTH_IT = 16  # positions that it takes a snapshot to be saved


class TreeCache(HoldsStates, Cache):
    """The cache of a whole model. `length` counts committed positions; rows behind them are a tree's.

    recurrences: of layers that carry a state, by layer and by place in it; they come when they are asked for.
    block: memory for the rows of all layers; None: each allocates its own. int8: keep keys and values in 8
    bits. windows: through which rows come to the device, where the block is in RAM.
    """

    def __init__(
        self,
        layers: int,
        capacity: int,
        block: CacheBlock | None = None,
        *,
        int8: bool = False,
        windows: CacheWindows | None = None,
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
        self._broken_off = False  # within a commit or a rewind, when states and positions may not agree

    def another(self) -> "TreeCache":
        """An empty cache like this one, with memory of its own, for one more sequence."""
        block = self.block.another()
        cache = TreeCache(len(self.rows), self._capacity, block, int8=self._int8, windows=self._windows)
        cache.snapshots.most = self.snapshots.most
        return cache

    def _layer(self, capacity: int, int8: bool) -> TreeCacheLayer:
        if self._windows is not None:
            apart = WindowedInt8Layer if int8 else WindowedLayer
            return apart(capacity, self._tables, self.block, self._windows)
        kind = Int8CacheLayer if int8 else TreeCacheLayer
        return kind(capacity, self._tables, self.block)

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
            devices = dict.fromkeys(store.device for store in stores)
            self._tables += [KVTable([s for s in stores if s.device == device]) for device in devices]
        if nodes:
            self.settle()
        for table in self._tables if nodes else ():
            kv_compact(table, start, [start + node for node in nodes])
        self.length = start + len(nodes)
        self._broken_off = False
        for layer in self.rows:
            layer.cut(self.length)

    def committed(self, start: int) -> list[KeysAndValues | None]:
        """Of each layer the committed positions from `start` on; None of a layer that holds nothing."""
        return [row.between(start, self.length) or None for row in self.rows]

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

    def settle(self) -> None:
        """Wait until all rows are where their stores are."""
        if self._windows is not None:
            self._windows.settle()

    def close(self) -> None:
        """Give back what is more than memory, when nothing is copied from it or to it any more."""
        try:
            if self._windows is not None:
                self._windows.finish()
        finally:
            self.block.close()

    def reusable(self, shared: int) -> int:
        """How many positions `rewind(shared)` would leave."""
        if not self.recurrences or shared == self.length:
            return shared
        return max((length for length in self.snapshots.lengths if length <= shared), default=0)

    def states(self) -> list[Snapshot]:
        """The states that can be gone back to, ascending, and last those that are committed."""
        if not self.recurrences:
            return []
        earlier = [snapshot for snapshot in self.snapshots.kept if snapshot.length < self.length]
        return [*earlier, self._snapshot(self.length)]

    def drop(self) -> None:
        """Forget everything, before the layers' stores are written from outside; `resume` ends that."""
        self._broken_off, self.length = True, 0
        for layer in self.rows:
            layer.cut(0)

    def resume(self, length: int, states: Sequence[Snapshot]) -> None:
        """Have `length` rows that were written to the stores for committed. states: as `states` gave them."""
        for recurrence in self.recurrences.values():
            recurrence.drop()
            recurrence.committed = Committed()
        self.snapshots = Snapshots(self.snapshots.most)
        for snapshot in states[:-1]:
            self.snapshots.add(snapshot)
        for place, found in states[-1].states.items() if states else ():
            self._recurrence(*place).committed = found
        for layer in self.rows:
            layer.cut(length)
        self.length = length
        self._broken_off = False

    def take_over(self, other: "TreeCache", length: int) -> int:
        """Hold, as committed, what another cache of the same model has of its first `length` positions.

        Where layers carry a state, these are those of the nearest snapshot. How many there are is returned.
        """
        other.settle()
        length = other.reusable(length)
        states = [*other.states()]
        while states and states[-1].length > length:
            states.pop()
        states += [state.copy() for state in states[-1:]]
        self.drop()
        for mine, its in zip(self.rows, other.rows, strict=True):
            mine.take_over(its, length)
        self.resume(length, states)
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

    def reached(self, layer: int, place: int) -> tuple[Recurrence]:
        return (self._recurrence(layer, place),)


class MergedCache(HoldsStates):
    """The caches of several sequences as one, for a layer through which their rows go together.

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
        """Append rows [1, KV, R, D] with padding at the end; all keys and all values of each sequence."""
        found = [
            cache.update(key_states[:, :, place], value_states[:, :, place], layer_idx)
            for cache, place in zip(self.caches, self._places, strict=True)
        ]
        keys, values = zip(*found, strict=True)
        return PartedTensor(keys), PartedTensor(values)

    def reached(self, layer: int, place: int) -> tuple[Recurrence, ...]:
        return tuple(found for cache in self.caches for found in cache.reached(layer, place))

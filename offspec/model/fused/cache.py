"""Keys and values of a lean model: all layers in one block, committed and rewound at once.

Letters: N layers, KV key heads, C capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.model.cache import KeysAndValues
from offspec_kernels.kv_compact import KVTable, kv_compact
from offspec_kernels.tree_mask import TreeMask


class LeanCache:
    """`TreeCache`'s semantics over one block [N, 2 KV, C, D]: of each layer the keys, then the values.

    `length` rows are committed; rows up to `filled` belong to the tree in work. What lies behind them is
    finite, since a step at fixed capacity reads it, if only to multiply it by nought.
    """

    def __init__(
        self, layers: int, heads: int, capacity: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._take(torch.zeros(layers, 2 * heads, capacity, size, dtype=dtype, device=device))
        self.length = 0
        self.filled = 0

    def _take(self, block: torch.Tensor) -> None:
        self.block, self.layers = block, block.unbind()
        self._table = KVTable([block.flatten(0, 1)])

    @property
    def capacity(self) -> int:
        return self.block.shape[2]

    def another(self) -> "LeanCache":
        """An empty cache of the same capacity for one more sequence."""
        layers, heads, capacity, size = self.block.shape
        return LeanCache(layers, heads // 2, capacity, size, self.block.dtype, self.block.device)

    def reserve(self, capacity: int) -> bool:
        """Make room for `capacity` rows, keeping what is there; says whether anything moved."""
        if capacity <= self.capacity:
            return False
        layers, heads, _, size = self.block.shape
        grown = self.block.new_zeros(layers, heads, capacity, size)
        grown[:, :, : self.filled] = self.block[:, :, : self.filled]
        self._take(grown)
        return True

    def commit(self, pending: int, nodes: Sequence[int], below: Sequence[int] = ()) -> None:
        """Commit `pending` rows in order, then the rows of `nodes` (counted from behind the pending ones).

        Rows of `below` stay behind them, uncommitted, and every other one is dropped. Rows must be ascending,
        which a path down a tree is, and what hangs below its end behind it.
        """
        start = self.length + pending
        end = start + len(nodes)
        assert end + len(below) <= self.filled
        kv_compact(self._table, start, [start + node for node in (*nodes, *below)])
        self.length, self.filled = end, end + len(below)

    def adopt(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        """As `TreeCache.adopt`; makes room where it must."""
        end = start + max((found[0].shape[2] for found in layers if found is not None), default=0)
        self.reserve(end)
        for kept, found in zip(self.layers, layers, strict=True):
            assert found is not None, "every layer of a plain model looks back"
            keys, values = found
            kept[: keys.shape[1], start:end] = keys[0]
            kept[keys.shape[1] :, start:end] = values[0]
        self.length = self.filled = end

    def adopt_states(self, other: object) -> None:
        """No layer of such a model carries a state."""

    def rewind(self, length: int) -> int:
        """Go back to `length` committed positions, dropping everything behind them; returns `length`."""
        assert 0 <= length <= self.length
        self.length = self.filled = length
        return length


@dataclass(frozen=True, slots=True)
class LeanRows:
    """Some rows of a forward, all of one sequence.

    Args:
        which: Of the forward's rows.
        cache: Of the sequence.
        tree_mask: What they may look at.
        to: Where in the cache they go: a slice, or [n] int64.
        end: Rows of the cache that are looked at, at most.
    """

    which: slice
    cache: LeanCache
    tree_mask: TreeMask
    to: slice | torch.Tensor
    end: int

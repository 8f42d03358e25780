"""KV cache of a fused model: all layers in one block, committed and rewound together.

Letters: N layers, KV key heads, C capacity, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offspec.model.cache import KeysAndValues
from offspec_kernels.kv_compact import KVTable, kv_compact
from offspec_kernels.tree_mask import TreeMask


class FusedCache:
    """Cache with `TreeCache`'s semantics in one block [N, 2 KV, C, D]: per layer the keys, then the values.

    `length` rows are committed; rows up to `filled` belong to the current tree. Later rows must have finite
    values, because a step at fixed capacity reads them, even though it multiplies them by zero.
    """

    def __init__(
        self, layers: int, heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._take(torch.zeros(layers, 2 * heads, capacity, head_dim, dtype=dtype, device=device))
        self.length = 0
        self.filled = 0

    def _take(self, block: torch.Tensor) -> None:
        self.block, self.layers = block, block.unbind()
        self._table = KVTable([block.flatten(0, 1)])

    @property
    def capacity(self) -> int:
        return self.block.shape[2]

    def empty_copy(self) -> "FusedCache":
        """Return an empty cache of the same capacity for another sequence."""
        layers, heads, capacity, size = self.block.shape
        return FusedCache(layers, heads // 2, capacity, size, self.block.dtype, self.block.device)

    def reserve(self, capacity: int) -> bool:
        """Grow to `capacity` rows, keeping the contents; return whether the memory moved."""
        if capacity <= self.capacity:
            return False
        layers, heads, _, size = self.block.shape
        grown = self.block.new_zeros(layers, heads, capacity, size)
        grown[:, :, : self.filled] = self.block[:, :, : self.filled]
        self._take(grown)
        return True

    def commit(self, pending: int, nodes: Sequence[int], below: Sequence[int] = ()) -> None:
        """Commit `pending` rows in order, then the rows of `nodes`, counted from the end of the pending rows.

        Rows of `below` are kept after these, uncommitted, and all others are dropped. Rows must be ascending,
        as those of a path down a tree and of the nodes below its end are.
        """
        start = self.length + pending
        end = start + len(nodes)
        assert end + len(below) <= self.filled
        kv_compact(self._table, start, [start + node for node in (*nodes, *below)])
        self.length, self.filled = end, end + len(below)

    def append_committed(self, start: int, layers: Sequence[KeysAndValues | None]) -> None:
        """Replace the rows from `start` on with another cache's, as committed rows; grow if needed."""
        end = start + max((found[0].shape[2] for found in layers if found is not None), default=0)
        self.reserve(end)
        for kept, found in zip(self.layers, layers, strict=True):
            assert found is not None, "every layer of a fused model has keys and values"
            keys, values = found
            kept[: keys.shape[1], start:end] = keys[0]
            kept[keys.shape[1] :, start:end] = values[0]
        self.length = self.filled = end

    def copy_states(self, other: object) -> None:
        """Do nothing: no layer of a fused model is recurrent."""

    def rewind(self, length: int) -> int:
        """Drop all but `length` committed positions; return `length`."""
        assert 0 <= length <= self.length
        self.length = self.filled = length
        return length


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Rows of one sequence in a forward.

    Args:
        which: Range of the rows within the forward.
        cache: Cache of the sequence.
        tree_mask: Keys that the rows may attend to.
        to: Destination in the cache: a slice, or [n] int64.
        end: Maximum number of cache rows that are read.
    """

    which: slice
    cache: FusedCache
    tree_mask: TreeMask
    to: slice | torch.Tensor
    end: int

"""Visibility of keys in a pass over token trees, without a mask of queries by keys.

Letters: B trees, each with a prefix of its own; N queries, the last rows of a pass; L prefix rows; C rows
after the prefix that form a chain; R tree rows after the chain; M = C + R; S = L + M key rows;
W = ceil(R / 64) words.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offspec_kernels.errors import ArgumentError
from offspec_kernels.transfer import upload

BITS = 64  # in a word


@dataclass(frozen=True, slots=True)
class AttentionChunk:
    """Chunks of `size` positions, counted from 0: a query sees no key of another chunk (Llama 4)."""

    size: int


Window = int | AttentionChunk  # number of positions visible to a query, including its own; or a chunk


def first_visible(window: Window, position: Any) -> Any:
    """Return the first position visible to a query at `position` (or an array of them); negative for all."""
    if isinstance(window, AttentionChunk):
        return position // window.size * window.size
    return position - (window - 1)


@dataclass(frozen=True, slots=True)
class TreeExtent:
    """Sizes of one tree on the host: L, row of its first query after the prefix, number of queries, C."""

    prefix: int
    first: int
    count: int
    causal: int

    @property
    def keys(self) -> int:
        """Number of key rows up to the last query's own row, which is the last visible key."""
        return self.prefix + self.first + self.count

    @property
    def numbers(self) -> NDArray[np.int32]:
        """The four numbers [4] as stored on a device."""
        return np.array([self.prefix, self.first, self.count, self.causal], np.int32)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Key rows visible to each query of each tree.

    Let query i be row f = first + i after the prefix. It sees key row j of tree b, counted from the beginning
    of that tree's prefix,
        if j < L                 always,
        if L <= j < L + C        when j - L <= f: a chain sees earlier rows, a tree its whole chain,
        if L + C <= j            when bit (j - L - C) of the query's words is set: an ancestor, or itself.
    Every query sees itself and no later row. A window w also requires
    position(query) - position(key) < w; a chunk of w requires both in the same chunk. A key of the prefix or
    chain has position j.
    position(query) - position(key) < w, with a chunk of w where both are of one chunk; a key of prefix or
    chain has position j.

    Args:
        prefix: [B] int32, L: rows of the prefix.
        first: [B] int32, row of the first query after the prefix.
        count: [B] int32, number of queries; later queries are padding and get zeros.
        causal: [B] int32, C: rows of the chain.
        words: [B, N, W] int64: bit r % 64 of word r // 64 is tree row r; zero for queries of the chain.
        position: [B, M] int64, positions of the rows after the prefix; None if no window is used.
    """

    prefix: Tensor
    first: Tensor
    count: Tensor
    causal: Tensor
    words: Tensor
    position: Tensor | None = None
    # Results shared by every layer of a pass: lists of keys, small masks, and the sizes on the host.
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    known: list[TreeExtent] = field(default_factory=list, compare=False, repr=False)
    # (batches, queries, keys) that this mask has been checked against.
    fitting: set[tuple[int, int, int]] = field(default_factory=set, compare=False, repr=False)
    # [N, W] for a mask of one tree: the words on the host.
    packed: list[NDArray[np.int64]] = field(default_factory=list, compare=False, repr=False)
    # [4, 1] for a mask of one tree: L, first, number of queries and C in one tensor.
    numbers: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(
        cls,
        ancestors: Tensor,
        *,
        prefix: int,
        causal: int = 0,
        first: int | None = None,
        position: Tensor | None = None,
        kept: dict[object, Any] | None = None,
        device: torch.device | None = None,
    ) -> "TreeMask":
        """Build the mask of one tree. Synchronizes if the ancestors are on a device.

        Args:
            ancestors: [N, R] bool: entry (i, r) is true if query i sees tree row r.
            prefix: Rows of the prefix, L.
            causal: Rows of the chain after the prefix, C; 0 by default.
            first: Row of the first query after the prefix; causal + R - N by default, which makes the queries
                the last rows.
            position: [M] int64, positions of the rows after the prefix; required for a window.
            kept: Cache shared by the masks of one pass, which bounds their total size.
            device: Device of the mask; the ancestors' device by default.

        Raises:
            ArgumentError: More queries than rows.
        """
        rows = len(ancestors)
        begin = causal + ancestors.shape[1] - rows if first is None else first
        if begin < 0:
            raise ArgumentError(
                "ancestors", f"{rows} queries do not fit in the {begin + rows} rows after the prefix"
            )
        extent = TreeExtent(prefix, begin, rows, causal)
        packed = pack_rows(ancestors.cpu().numpy())
        words, numbers = upload([packed, extent.numbers], device or ancestors.device)
        return cls.uploaded(extent, packed, words, numbers, position, kept)

    @classmethod
    def uploaded(
        cls,
        extent: TreeExtent,
        packed: NDArray[np.int64],
        words: Tensor,
        numbers: Tensor,
        position: Tensor | None = None,
        kept: dict[object, Any] | None = None,
    ) -> "TreeMask":
        """Build the mask of one tree whose words [N, W] and `extent.numbers` are already on the device.

        packed: the words on the host; position, kept: as in `of`.
        """
        prefix, first, count, causal = (columns := numbers[:, None]).unbind()
        return cls(
            prefix,
            first,
            count,
            causal,
            words[None],
            position=None if position is None else position[None],
            numbers=columns,
            kept={} if kept is None else kept,
            known=[extent],
            packed=[packed],
        )

    def clear_cache(self) -> None:
        """Drop cached results after the tensors have been written to."""
        self.kept.clear()
        self.known.clear()
        self.fitting.clear()
        self.packed.clear()

    def words_of(self, tree: int) -> NDArray[np.int64]:
        """Return the words [queries, W] of a tree on the host. Synchronizes if only the device has them."""
        packed = self.packed[tree] if self.packed else self.words[tree].cpu().numpy()
        return packed[: self.extents()[tree].count]

    def extents(self) -> list[TreeExtent]:
        """Return the sizes of each tree. On a GPU the first call for a mask synchronizes."""
        if not self.known:
            columns = (self.prefix.tolist(), self.first.tolist(), self.count.tolist(), self.causal.tolist())
            self.known.extend(TreeExtent(*numbers) for numbers in zip(*columns, strict=True))
        return self.known

    def visible(
        self, tree: int, rows: tuple[int, int], keys: tuple[int, int], window: Window | None = None
    ) -> Tensor:
        """Return a dense mask [rows, keys] bool of some queries and keys of one tree.

        Workspace: twice the result, with a window three times.

        Args:
            tree: Index b of the tree.
            rows: (start, end) of the queries.
            keys: (start, end) of the key rows.
            window: Number of positions visible to a query, or a chunk; no limit by default.
        """
        reach, (start, end) = self.extents()[tree], keys
        row = torch.arange(*rows, device=self.words.device)[:, None]
        key = torch.arange(start, end, device=self.words.device)[None]
        seen = key - reach.prefix <= row + reach.first  # includes the prefix, whose index is negative
        of_tree = reach.prefix + reach.causal  # the first key of the tree
        bit = torch.arange(BITS, device=self.words.device)
        for word in range(max(start - of_tree, 0) // BITS, -(-(end - of_tree) // BITS)):
            some = slice(max(of_tree + word * BITS, start), min(of_tree + (word + 1) * BITS, end))
            shift = bit[some.start - of_tree - word * BITS : some.stop - of_tree - word * BITS]
            known = (
                self.words[tree, rows[0] : rows[1], word : word + 1] >> shift
            )  # one word at a time, since it is int64
            seen[:, some.start - start : some.stop - start] &= (known & 1).bool()
        if window:
            first = first_visible(window, self._places(tree, row[:, 0] + reach.first))
            seen &= self.key_positions(tree, start, end) >= first[:, None]
        return seen

    def key_positions(self, tree: int, start: int, end: int) -> Tensor:
        """Return the absolute positions [end - start] int64 of key rows."""
        return self._places(
            tree, torch.arange(start, end, device=self.words.device) - self.extents()[tree].prefix
        )

    def _places(self, tree: int, behind: Tensor) -> Tensor:
        """Return absolute positions of rows counted from the prefix's end; negative: in the prefix."""
        assert self.position is not None
        last = self.position.shape[1] - 1
        place = self.position[tree][behind.clamp(0, last)]
        return torch.where(behind < 0, behind + self.extents()[tree].prefix, place)


def pack_rows(visible: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Pack [N, R] into [N, W]: bit r % 64 of word r // 64 is column r."""
    rows, columns = visible.shape
    words = max(1, -(-columns // BITS))
    packed = np.zeros((rows, words * (BITS // 8)), np.uint8)
    packed[:, : -(-columns // 8)] = np.packbits(visible, axis=1, bitorder="little")
    return packed.view("<i8")

"""Who sees whom in a pass over token trees, without a mask of queries by keys.

Letters: B trees, each over a prefix of its own; N queries, the last rows of a pass; L prefix rows; C rows
behind the prefix that are a chain; R tree rows behind the chain; M = C + R; S = L + M key rows;
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

BITS = 64  # of a word


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions in chunks of `size`, the first from 0 on: a query sees no key of another chunk (Llama 4)."""

    size: int


Window = int | Chunk  # positions that a query looks back, its own included; or a chunk of them


def first_seen(window: Window, position: Any) -> Any:
    """The first position that a query at `position` sees, of an array of them alike; negative for all."""
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return position - (window - 1)


@dataclass(frozen=True, slots=True)
class TreeExtent:
    """One tree's numbers, on the host: L, the row behind the prefix of its first query, queries, C."""

    prefix: int
    first: int
    count: int
    causal: int

    @property
    def keys(self) -> int:
        """Key rows up to the last query's own, which is the last that any of them sees."""
        return self.prefix + self.first + self.count

    @property
    def numbers(self) -> NDArray[np.int32]:
        """[4] as they lie on a device."""
        return np.array([self.prefix, self.first, self.count, self.causal], np.int32)


@dataclass(frozen=True, slots=True)
class TreeMask:
    """Which key rows each query of each tree sees.

    Key row j of tree b, counted from the beginning of its prefix, is seen by query i, which is itself row
    f = first + i behind the prefix,
        where j < L                 always,
        where L <= j < L + C        if j - L <= f: a chain sees what came before, a tree all of its chain,
        where L + C <= j            if bit (j - L - C) of the query's words is set: an ancestor, or itself.
    Every query sees itself, and none sees a row behind its own. With a window w all of this holds only where
    position(query) - position(key) < w, with a chunk of w where both are of one chunk; a key of prefix or
    chain has position j.

    Args:
        prefix: [B] int32, L: rows of the prefix.
        first: [B] int32, row of the first query behind the prefix.
        count: [B] int32, queries; those behind them are padding, and get zeros.
        causal: [B] int32, C: rows of the chain.
        words: [B, N, W] int64: bit r % 64 of word r // 64 is tree row r; zero for queries of the chain.
        position: [B, M] int64, of the rows behind the prefix; None where no window is used.
    """

    prefix: Tensor
    first: Tensor
    count: Tensor
    causal: Tensor
    words: Tensor
    position: Tensor | None = None
    # What is worked out once and serves every layer of a pass: lists of keys, small masks, and the numbers
    # on the host.
    kept: dict[object, Any] = field(default_factory=dict, compare=False, repr=False)
    known: list[TreeExtent] = field(default_factory=list, compare=False, repr=False)
    # Batches, queries and keys that this has been found to fit.
    fitting: set[tuple[int, int, int]] = field(default_factory=set, compare=False, repr=False)
    # [N, W] of a mask of one tree: the words as the host has them.
    packed: list[NDArray[np.int64]] = field(default_factory=list, compare=False, repr=False)
    # [4, 1] of a mask of one tree: L, first, queries and C in one tensor.
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
        """The mask of one tree. Waits for a device that holds the ancestors.

        Args:
            ancestors: [N, R] bool: entry (i, r) says that query i sees tree row r.
            prefix: Rows of the prefix, L.
            causal: Rows of the chain behind it, C; 0 by default.
            first: Row of the first query behind the prefix; by default the queries are the last rows, which
                makes it causal + R - N.
            position: [M] int64, of the rows behind the prefix; needed for a window.
            kept: Shared by the masks of one pass, so that what they cache is bounded together.
            device: Where the mask is to be; where the ancestors are by default.

        Raises:
            ArgumentError: There are more queries than rows.
        """
        rows = len(ancestors)
        begin = causal + ancestors.shape[1] - rows if first is None else first
        if begin < 0:
            raise ArgumentError(
                "ancestors", f"there are {rows} queries and {begin + rows} rows behind the prefix"
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
        """The mask of one tree whose words [N, W] and `extent.numbers` are on the device already.

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

    def forget(self) -> None:
        """Drop what was worked out: the tensors have been written to."""
        self.kept.clear()
        self.known.clear()
        self.fitting.clear()
        self.packed.clear()

    def words_of(self, tree: int) -> NDArray[np.int64]:
        """[queries, W] of a tree on the host. Waits for the device where only that has them."""
        packed = self.packed[tree] if self.packed else self.words[tree].cpu().numpy()
        return packed[: self.reaches()[tree].count]

    def reaches(self) -> list[TreeExtent]:
        """The numbers of each tree. On a GPU the first call for a mask waits for the device."""
        if not self.known:
            columns = (self.prefix.tolist(), self.first.tolist(), self.count.tolist(), self.causal.tolist())
            self.known.extend(TreeExtent(*numbers) for numbers in zip(*columns, strict=True))
        return self.known

    def visible(
        self, tree: int, rows: tuple[int, int], keys: tuple[int, int], window: Window | None = None
    ) -> Tensor:
        """[rows, keys] bool: a dense mask of some queries and keys of one tree.

        Scratch: the result twice, with a window three times.

        Args:
            tree: Index b of the tree.
            rows: (start, end) of the queries.
            keys: (start, end) of the key rows.
            window: Positions that a query looks back, or a chunk of them; no limit by default.
        """
        reach, (start, end) = self.reaches()[tree], keys
        row = torch.arange(*rows, device=self.words.device)[:, None]
        key = torch.arange(start, end, device=self.words.device)[None]
        seen = key - reach.prefix <= row + reach.first  # the prefix, too: there it is negative
        of_tree = reach.prefix + reach.causal  # the first key of the tree
        bit = torch.arange(BITS, device=self.words.device)
        for word in range(max(start - of_tree, 0) // BITS, -(-(end - of_tree) // BITS)):
            some = slice(max(of_tree + word * BITS, start), min(of_tree + (word + 1) * BITS, end))
            shift = bit[some.start - of_tree - word * BITS : some.stop - of_tree - word * BITS]
            known = self.words[tree, rows[0] : rows[1], word : word + 1] >> shift  # a word at a time: int64
            seen[:, some.start - start : some.stop - start] &= (known & 1).bool()
        if window:
            first = first_seen(window, self._places(tree, row[:, 0] + reach.first))
            seen &= self.key_places(tree, start, end) >= first[:, None]
        return seen

    def key_places(self, tree: int, start: int, end: int) -> Tensor:
        """[end - start] int64: absolute positions of key rows."""
        return self._places(
            tree, torch.arange(start, end, device=self.words.device) - self.reaches()[tree].prefix
        )

    def _places(self, tree: int, behind: Tensor) -> Tensor:
        """Absolute positions of rows counted from the prefix's end; negative ones are its own."""
        assert self.position is not None
        last = self.position.shape[1] - 1
        place = self.position[tree][behind.clamp(0, last)]
        return torch.where(behind < 0, behind + self.reaches()[tree].prefix, place)


def pack_rows(sees: NDArray[np.bool_]) -> NDArray[np.int64]:
    """[N, R] to [N, W]: bit r % 64 of word r // 64 is column r."""
    rows, columns = sees.shape
    words = max(1, -(-columns // BITS))
    packed = np.zeros((rows, words * (BITS // 8)), np.uint8)
    packed[:, : -(-columns // 8)] = np.packbits(sees, axis=1, bitorder="little")
    return packed.view("<i8")

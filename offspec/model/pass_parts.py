"""Rows of a pass, of one sequence or several, split into parts that go through a layer together.

Letters: T rows of a sequence in this pass, R rows of a pass including padding.
"""

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch

from offspec.model.attention import MergedContext, TreeContext
from offspec.model.cache import MergedCache
from offspec.model.row_counts import RowCounts
from offspec_kernels.chunks import split_evenly


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """Rows of one sequence in a pass.

    Args:
        tokens: [T] token ids.
        context: Positions and visibility of the rows, for this pass only.
        cache: Cache of the sequence, of the model's kind, to which keys and values are appended.
    """

    tokens: torch.Tensor
    context: TreeContext
    cache: Any


@dataclass(frozen=True, slots=True)
class PartRows:
    """Rows of one sequence that go through a layer together.

    Args:
        sequence: Sequence of the rows.
        first_row: Index of the first row among all rows of the pass without padding.
        rows: Number of rows.
        last: End of the rows among all rows after the sequence's prefix.
        is_text: Whether the rows belong to a prompt.
    """

    sequence: SequenceRows
    first_row: int
    rows: int
    last: int
    is_text: bool


@dataclass(frozen=True, slots=True)
class PassPart:
    """Rows that go through a layer together, of one sequence or several, padded with copies of the last row.

    Args:
        pieces: Consecutive rows of different sequences.
        start: Index of the first row among all rows of the padded pass.
        padding: Number of padding rows.
    """

    pieces: tuple[PartRows, ...]
    start: int
    padding: int
    _left: dict[int, MutableMapping[Any, Any]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of rows, including padding."""
        return sum(piece.rows for piece in self.pieces) + self.padding

    @property
    def place(self) -> slice:
        """Range of this part's rows among those of the padded pass."""
        return slice(self.start, self.start + self.rows)

    @property
    def places(self) -> tuple[slice, ...]:
        """Range of each piece's rows within this part."""
        ends = accumulate((piece.rows for piece in self.pieces), initial=0)
        return tuple(slice(start, end) for start, end in pairwise(ends))

    def begin(self, device: torch.device) -> TreeContext | MergedContext:
        """Prepare caches and contexts for these rows; return the context for layers on `device`."""
        alone, contexts = len(self.pieces) == 1, list[TreeContext]()
        for piece in self.pieces:
            context = piece.sequence.context.on(device)
            piece.sequence.cache.padding = context.padding = self.padding if alone else 0
            context.end = piece.last
            contexts.append(context)
        if alone:
            return contexts[0]
        return MergedContext(tuple(contexts), self.places, self.padding)

    def cache(self) -> Any:
        """Return the cache to which keys and values of these rows are appended."""
        caches = [piece.sequence.cache for piece in self.pieces]
        return caches[0] if len(caches) == 1 else MergedCache(caches, self.places)

    def left_in(self, shared: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
        """Return this part's own dictionary in place of one in which layers store keys for later layers."""
        return self._left.setdefault(id(shared), type(shared)())

    def rows_of(self, value: Any, rows: int) -> Any:
        """Return these rows of every tensor in `value` that has R = `rows` rows."""
        return map_rows(value, rows, lambda tensor, axis: tensor.narrow(axis, self.start, self.rows))


def map_rows(value: Any, rows: int, take: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """Apply `take` to each per-row tensor and its axis of R rows; return any other value unchanged.

    Per-row tensors are [1, R, ...] or [n, 1, R, ...], also within tuples.
    """
    if isinstance(value, torch.Tensor) and value.dim() >= 2:
        if value.shape[0] == 1 and value.shape[1] == rows:
            return take(value, 1)
        if value.dim() >= 3 and value.shape[1] == 1 and value.shape[2] == rows:
            return take(value, 2)
    if isinstance(value, tuple):
        return tuple(map_rows(item, rows, take) for item in value)
    return value


def split_pass(
    sequences: Sequence[SequenceRows],
    chunk: int,
    counts: RowCounts,
    *,
    merges: bool = False,
    mixes: bool = False,
) -> list[PassPart]:
    """Split a pass into parts that go through the layers one after another.

    Args:
        sequences: Rows of each sequence.
        chunk: Approximate maximum of a part's rows.
        counts: Row counts that parts are padded to.
        merges: Whether a part may have rows of several sequences; prompts then come first.
        mixes: Whether a prompt and the tree after it share a part if all their rows fit, so that packed
            weights are unpacked once for both. Otherwise the tree does not increase the memory for the states
            of a long prompt.
    """
    pieces = list(_pieces(sequences, chunk, mixes))
    if merges:
        pieces.sort(key=lambda piece: not piece.is_text)
    groups = list[list[PartRows]]()
    for piece in pieces:
        group = groups[-1] if merges and groups else []
        fits = sum(other.rows for other in group) + piece.rows <= chunk
        others = all(piece.sequence is not other.sequence for other in group)
        if group and fits and others and piece.is_text == group[0].is_text:
            group.append(piece)
        else:
            groups.append([piece])
    parts, start = list[PassPart](), 0
    for group in groups:
        rows = sum(piece.rows for piece in group)
        parts.append(PassPart(tuple(group), start, counts.padded(rows) - rows))
        start += parts[-1].rows
    return parts


def _pieces(sequences: Sequence[SequenceRows], chunk: int, mixes: bool) -> Iterator[PartRows]:
    before = 0
    for sequence in sequences:
        rows, tree = len(sequence.tokens), sequence.context
        earlier = len(tree.position) - rows  # of an earlier pass
        prompt = max(tree.causal - earlier, 0)
        ends = [0, rows] if mixes and rows <= chunk else [0, prompt, rows]
        for cut in (cut for start, end in pairwise(ends) for cut in split_evenly(start, end, chunk)):
            count = cut.stop - cut.start
            yield PartRows(sequence, before + cut.start, count, earlier + cut.stop, cut.start < prompt)
        before += rows


def order_of(parts: Sequence[PassPart]) -> torch.Tensor:
    """Return, for each row [R] of the padded pass, its index among the rows without padding."""
    order = list[torch.Tensor]()
    for part in parts:
        order += [torch.arange(piece.first_row, piece.first_row + piece.rows) for piece in part.pieces]
        order.append(order[-1][-1:].expand(part.padding))
    return torch.cat(order)


def to_input_order(states: torch.Tensor, parts: Sequence[PassPart]) -> torch.Tensor:
    """Return states [T, H] in input order, without padding, from those [R, H] of the padded pass."""
    found = list[tuple[int, torch.Tensor]]()
    for part in parts:
        rows = states[part.place]
        found += [(piece.first_row, rows[own]) for piece, own in zip(part.pieces, part.places, strict=True)]
    found.sort(key=lambda piece: piece[0])
    return joined([rows for _, rows in found])


def split_chunks(counts: Sequence[int], most: int, *, alone: bool = False) -> list[list[tuple[int, slice]]]:
    """Split the rows of several sequences into chunks, each a list of (sequence, range of its rows).

    Args:
        counts: Rows of each sequence.
        most: Maximum rows of a chunk.
        alone: Whether each chunk has rows of one sequence only.
    """
    chunks, room = list[list[tuple[int, slice]]](), 0
    for index, count in enumerate(counts):
        start = 0
        while start < count:
            if not room or (alone and not start):
                chunks.append([])
                room = most
            stop = min(start + room, count)
            chunks[-1].append((index, slice(start, stop)))
            room -= stop - start
            start = stop
    return chunks


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors along their first dimension."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])

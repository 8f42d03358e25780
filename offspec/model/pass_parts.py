"""The rows of a pass, of one sequence or several, and what of them goes through a layer together.

Letters: T rows of a sequence in this pass, R rows of a pass with its padding.
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
    """The rows of one sequence in a pass.

    Args:
        tokens: [T].
        context: Which of them see which; for this pass alone.
        cache: Of the sequence, and of the model's kind, to which their keys and values are appended.
    """

    tokens: torch.Tensor
    context: TreeContext
    cache: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence that go through a layer together.

    Args:
        sequence: Whose they are.
        asked: The first of them, among all rows of the pass without padding.
        rows: How many they are.
        last: Where they end among all rows behind the sequence's prefix.
        is_text: Whether they are of a prompt.
    """

    sequence: SequenceRows
    asked: int
    rows: int
    last: int
    is_text: bool


@dataclass(frozen=True, slots=True)
class Part:
    """What goes through a layer together: rows of one sequence or of several, then copies of the last.

    Args:
        pieces: Of different sequences, one behind the other.
        start: The first row, among all rows of the padded pass.
        padding: How many copies there are.
    """

    pieces: tuple[Piece, ...]
    start: int
    padding: int
    _left: dict[int, MutableMapping[Any, Any]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Copies included."""
        return sum(piece.rows for piece in self.pieces) + self.padding

    @property
    def place(self) -> slice:
        """Of its rows among those of the padded pass."""
        return slice(self.start, self.start + self.rows)

    @property
    def places(self) -> tuple[slice, ...]:
        """Of the rows of each piece among its own."""
        ends = accumulate((piece.rows for piece in self.pieces), initial=0)
        return tuple(slice(start, end) for start, end in pairwise(ends))

    def begin(self, device: torch.device) -> TreeContext | MergedContext:
        """Tell caches and contexts that these rows run now; the context for layers on that device."""
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
        """To which keys and values of these rows are appended."""
        caches = [piece.sequence.cache for piece in self.pieces]
        return caches[0] if len(caches) == 1 else MergedCache(caches, self.places)

    def left_in(self, shared: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
        """Its own in the place of a dictionary in which layers leave keys for later layers."""
        return self._left.setdefault(id(shared), type(shared)())

    def rows_of(self, value: Any, rows: int) -> Any:
        """These rows of whatever is per row, where there are R of them in all."""
        return map_rows(value, rows, lambda tensor, axis: tensor.narrow(axis, self.start, self.rows))


def map_rows(value: Any, rows: int, take: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    """`take` of each per-row tensor and its axis of R rows ([1, R, ...], [n, 1, R, ...], tuples of them); any
    other value as it is."""
    if isinstance(value, torch.Tensor) and value.dim() >= 2:
        if value.shape[0] == 1 and value.shape[1] == rows:
            return take(value, 1)
        if value.dim() >= 3 and value.shape[1] == 1 and value.shape[2] == rows:
            return take(value, 2)
    if isinstance(value, tuple):
        return tuple(map_rows(item, rows, take) for item in value)
    return value


def parts_of(
    sequences: Sequence[SequenceRows],
    chunk: int,
    counts: RowCounts,
    *,
    merges: bool = False,
    mixes: bool = False,
) -> list[Part]:
    """What goes through the layers together, in this order: at most about `chunk` rows each.

    merges: whether rows of several sequences may go together; then prompts come first. mixes: whether a
    prompt and the tree behind it go together where all their rows fit, so that packed weights are unpacked
    once for both; else the states of a long prompt need no more room because a tree rides behind it.
    """
    pieces = list(_pieces(sequences, chunk, mixes))
    if merges:
        pieces.sort(key=lambda piece: not piece.is_text)
    groups = list[list[Piece]]()
    for piece in pieces:
        group = groups[-1] if merges and groups else []
        fits = sum(other.rows for other in group) + piece.rows <= chunk
        others = all(piece.sequence is not other.sequence for other in group)
        if group and fits and others and piece.is_text == group[0].is_text:
            group.append(piece)
        else:
            groups.append([piece])
    parts, start = list[Part](), 0
    for group in groups:
        rows = sum(piece.rows for piece in group)
        parts.append(Part(tuple(group), start, counts.padded(rows) - rows))
        start += parts[-1].rows
    return parts


def _pieces(sequences: Sequence[SequenceRows], chunk: int, mixes: bool) -> Iterator[Piece]:
    before = 0
    for sequence in sequences:
        rows, tree = len(sequence.tokens), sequence.context
        earlier = len(tree.position) - rows  # of an earlier pass
        prompt = max(tree.causal - earlier, 0)
        ends = [0, rows] if mixes and rows <= chunk else [0, prompt, rows]
        for cut in (cut for start, end in pairwise(ends) for cut in split_evenly(start, end, chunk)):
            count = cut.stop - cut.start
            yield Piece(sequence, before + cut.start, count, earlier + cut.stop, cut.start < prompt)
        before += rows


def order_of(parts: Sequence[Part]) -> torch.Tensor:
    """Which of the rows without padding each row [R] of the padded pass is."""
    order = list[torch.Tensor]()
    for part in parts:
        order += [torch.arange(piece.asked, piece.asked + piece.rows) for piece in part.pieces]
        order.append(order[-1][-1:].expand(part.padding))
    return torch.cat(order)


def as_asked(states: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """The states [T, H] of a pass, of all sequences without padding, from those [R, H] of the padded pass."""
    found = list[tuple[int, torch.Tensor]]()
    for part in parts:
        rows = states[part.place]
        found += [(piece.asked, rows[own]) for piece, own in zip(part.pieces, part.places, strict=True)]
    found.sort(key=lambda piece: piece[0])
    return joined([rows for _, rows in found])


def chunks_of(counts: Sequence[int], most: int, *, alone: bool = False) -> list[list[tuple[int, slice]]]:
    """Rows of several sequences in order, by what is computed together: (sequence, its rows) of each chunk.

    Args:
        counts: Rows of each sequence.
        most: Rows of a chunk.
        alone: Have no chunk with rows of several sequences.
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
    """One behind the other, by their first dimension."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts])

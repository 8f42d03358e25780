"""One recurrence of a layer: what is committed of it, and the rows behind.

Letters: T rows of a part, R rows of the tree so far, C channels, K taps, G heads of keys, H of values, D
numbers of a key, E of a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offspec.model.recurrence.paths import PartPaths
from offspec_kernels.tree_conv import tree_conv
from offspec_kernels.tree_scan import WalkOrder, tree_scan, walk_order

Rows = dict[str, torch.Tensor]  # what is known of rows, by name, each [T, ...]


@dataclass(frozen=True, slots=True)
class Committed:
    """What is kept of a text: the last K - 1 inputs [K - 1, C] of a convolution, and a state [H, D, E].

    Either is None where there is none of it, and before the first row.
    """

    tail: torch.Tensor | None = None
    state: torch.Tensor | None = None

    def on(self, device: torch.device) -> "Committed":
        """The same on a device."""
        return Committed(*(None if part is None else part.to(device) for part in (self.tail, self.state)))

    def copy(self) -> "Committed":
        return Committed(*(None if part is None else part.clone() for part in (self.tail, self.state)))


@dataclass(frozen=True, slots=True)
class Update:
    """What rows add to a state, as `tree_scan` takes it."""

    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None = None
    rates: torch.Tensor | None = None

    def scan(
        self,
        state: torch.Tensor | None,
        order: WalkOrder,
        query: torch.Tensor | None = None,
        final: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """`tree_scan` from a state, nought where it is None."""
        if state is None:
            state = self.nothing()
        return tree_scan(
            self.key, self.value, self.decay, state, order,
            query=query, beta=self.beta, rates=self.rates, final=final,
        )  # fmt: skip

    @property
    def numbers(self) -> int:
        """Of a state, and of the rates that are kept with it."""
        state = self.value[0].numel() * self.key.shape[2]
        return state if self.rates is None else 2 * state

    def nothing(self) -> torch.Tensor:
        """The state before the first row."""
        _, heads, width = self.value.shape
        return torch.zeros(heads, self.key.shape[2], width, device=self.key.device)


class Recurrence:
    """A convolution, a scan, or one behind the other.

    committed: of the committed positions. What the text in front of a pass makes of it waits beside it, and
    of the tree's rows what they add.
    """

    def __init__(self) -> None:
        self.committed = Committed()
        self._tail: torch.Tensor | None = None  # behind the text of this pass, where there is some
        self._state: torch.Tensor | None = None
        self._taps = 0
        self._inputs: torch.Tensor | None = None  # of the convolution, [R, C]
        self._rows: Rows = {}  # of the scan
        self._update: Callable[[Rows], Update] | None = None
        self.state_numbers = self.tail_numbers = 0  # as soon as there is a row

    @property
    def row_bytes(self) -> int:
        """Bytes kept of the rows of the tree."""
        return sum(rows.nbytes for rows in (self._inputs, *self._rows.values()) if rows is not None)

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, paths: PartPaths
    ) -> torch.Tensor:
        """rows [T, C], weight [C, K] to [T, C] float32."""
        self._bring(rows.device)
        if not self._taps:
            self._taps = weight.shape[1]
            self.tail_numbers = (self._taps - 1) * rows.shape[1]
        if paths.is_text:
            inputs = self._behind_tail(rows)
            self._tail = inputs[len(rows) :].clone()
        else:
            self._inputs = _appended(self._inputs, rows, paths.first)
            inputs = self._behind_tail(self._inputs)
        return tree_conv(inputs, paths.window(self._taps, rows.device), weight, bias)

    def scan(
        self, rows: Rows, query: torch.Tensor, update: Callable[[Rows], Update], paths: PartPaths
    ) -> torch.Tensor:
        """What rows get, [T, H, E] float32.

        Args:
            rows: All that `update` needs of them.
            query: [T, G, D].
            update: Makes of rows what is added to the state.
            paths: How they follow each other.
        """
        self._update = update
        self._bring(query.device)
        before, state = paths.first, self.committed.state if self._state is None else self._state
        if paths.is_text:
            step, final = update(rows), self._state
            if final is None:
                final = step.nothing()
            out, self._state = step.scan(state, paths.order, query, final), final
        else:
            self._rows = {name: _appended(self._rows.get(name), kept, before) for name, kept in rows.items()}
            if before:
                query = torch.cat([query.new_zeros(before, *query.shape[1:]), query])
            step = update(self._rows)
            out = step.scan(state, paths.order, query)
        assert out is not None
        self.state_numbers = step.numbers
        return out[before:]

    def commit_text(self) -> Committed | None:
        """Commit the text of the pass; what was committed before it, or None where there was no text."""
        before = self.committed
        if self._tail is None and self._state is None:
            return None
        self.committed = Committed(self._tail, self._state)
        self._tail = self._state = None
        return before

    def commit_rows(self, nodes: Sequence[int]) -> None:
        """Commit a path of the tree's rows, a parent before its child, and drop the others."""
        tail, state = self.committed.tail, self.committed.state
        if nodes and self._inputs is not None:
            tail = self._behind_tail(self._inputs[list(nodes)])[len(nodes) :].clone()
        if nodes and self._rows:
            assert self._update is not None
            step = self._update({name: rows[list(nodes)] for name, rows in self._rows.items()})
            if state is None:
                state = step.nothing()
            step.scan(state, walk_order(range(-1, len(nodes) - 1)), final=state)
        self.committed = Committed(tail, state)
        self.drop()

    def drop(self) -> None:
        """Forget what is not committed."""
        self._tail = self._state = self._inputs = None
        self._rows = {}

    def _bring(self, device: torch.device) -> None:
        """Have what is committed where the rows are: it may have been another cache's, on another device."""
        parts = (self.committed.tail, self.committed.state)
        if any(part is not None and part.device != device for part in parts):
            self.committed = self.committed.on(device)

    def _behind_tail(self, rows: torch.Tensor) -> torch.Tensor:
        """[K - 1 + n, C]: rows [n, C] with the inputs before them in front."""
        tail = self.committed.tail if self._tail is None else self._tail
        if tail is None:
            tail = rows.new_zeros(self._taps - 1, rows.shape[1])
        return torch.cat([tail, rows])


def _appended(kept: torch.Tensor | None, rows: torch.Tensor, before: int) -> torch.Tensor:
    """rows behind the first `before` that are kept; what is kept is no view of something larger."""
    return rows.clone() if kept is None or not before else torch.cat([kept[:before], rows])

"""One recurrence of a layer: its committed state, and the rows after it.

Letters: T rows of a part, R rows of the tree so far, C channels, K taps, G heads of keys, H of values, D
numbers of a key, E of a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offspec.model.recurrence.paths import PartPaths
from offspec_kernels.tree_conv import tree_conv
from offspec_kernels.tree_scan import TraversalOrder, traversal_order, tree_scan

Rows = dict[str, torch.Tensor]  # inputs of rows by name, each [T, ...]


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """State after a text: the last K - 1 inputs [K - 1, C] of a convolution, and a scan state [H, D, E].

    Each is None if the layer has none, and before the first row.
    """

    tail: torch.Tensor | None = None
    state: torch.Tensor | None = None

    def on(self, device: torch.device) -> "RecurrentState":
        """Return this state on a device."""
        return RecurrentState(
            *(None if part is None else part.to(device) for part in (self.tail, self.state))
        )

    def copy(self) -> "RecurrentState":
        return RecurrentState(*(None if part is None else part.clone() for part in (self.tail, self.state)))


@dataclass(frozen=True, slots=True)
class StateUpdate:
    """Update of a state by rows, as arguments of `tree_scan`."""

    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    beta: torch.Tensor | None = None
    rates: torch.Tensor | None = None

    def scan(
        self,
        state: torch.Tensor | None,
        order: TraversalOrder,
        query: torch.Tensor | None = None,
        final: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run `tree_scan` from a state; None stands for zeros."""
        if state is None:
            state = self.nothing()
        return tree_scan(
            self.key, self.value, self.decay, state, order,
            query=query, beta=self.beta, rates=self.rates, final=final,
        )  # fmt: skip

    @property
    def numbers(self) -> int:
        """Numbers of a state, including the rates stored with it."""
        state = self.value[0].numel() * self.key.shape[2]
        return state if self.rates is None else 2 * state

    def nothing(self) -> torch.Tensor:
        """Return the state before the first row."""
        _, heads, width = self.value.shape
        return torch.zeros(heads, self.key.shape[2], width, device=self.key.device)


class Recurrence:
    """Convolution, scan, or a convolution followed by a scan.

    `committed` is the state after the committed positions. The state after the text of the current pass, and
    the updates of the tree's rows, are stored separately until the commit.
    """

    def __init__(self) -> None:
        self.committed = RecurrentState()
        self._tail: torch.Tensor | None = None  # after the text of this pass, if any
        self._state: torch.Tensor | None = None
        self._taps = 0
        self._inputs: torch.Tensor | None = None  # of the convolution, [R, C]
        self._rows: Rows = {}  # of the scan
        self._update: Callable[[Rows], StateUpdate] | None = None
        self.state_numbers = self.tail_numbers = 0  # set by the first row

    @property
    def row_bytes(self) -> int:
        """Bytes stored for the rows of the tree."""
        return sum(rows.nbytes for rows in (self._inputs, *self._rows.values()) if rows is not None)

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, paths: PartPaths
    ) -> torch.Tensor:
        """Convolve rows [T, C] with weight [C, K]; return [T, C] float32."""
        self._move_to(rows.device)
        if not self._taps:
            self._taps = weight.shape[1]
            self.tail_numbers = (self._taps - 1) * rows.shape[1]
        if paths.is_text:
            inputs = self._after_tail(rows)
            self._tail = inputs[len(rows) :].clone()
        else:
            self._inputs = _appended(self._inputs, rows, paths.first)
            inputs = self._after_tail(self._inputs)
        return tree_conv(inputs, paths.window(self._taps, rows.device), weight, bias)

    def scan(
        self, rows: Rows, query: torch.Tensor, update: Callable[[Rows], StateUpdate], paths: PartPaths
    ) -> torch.Tensor:
        """Return the scan's output for rows, [T, H, E] float32.

        Args:
            rows: Inputs of `update`, by name.
            query: [T, G, D], queries of the rows.
            update: Returns the state update for rows.
            paths: Predecessors of the rows.
        """
        self._update = update
        self._move_to(query.device)
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

    def commit_text(self) -> RecurrentState | None:
        """Commit the text of the pass; return the previous committed state, or None if there was no text."""
        before = self.committed
        if self._tail is None and self._state is None:
            return None
        self.committed = RecurrentState(self._tail, self._state)
        self._tail = self._state = None
        return before

    def commit_rows(self, nodes: Sequence[int]) -> None:
        """Commit a path of the tree's rows, a parent before its child, and drop the others."""
        tail, state = self.committed.tail, self.committed.state
        if nodes and self._inputs is not None:
            tail = self._after_tail(self._inputs[list(nodes)])[len(nodes) :].clone()
        if nodes and self._rows:
            assert self._update is not None
            step = self._update({name: rows[list(nodes)] for name, rows in self._rows.items()})
            if state is None:
                state = step.nothing()
            step.scan(state, traversal_order(range(-1, len(nodes) - 1)), final=state)
        self.committed = RecurrentState(tail, state)
        self.drop()

    def drop(self) -> None:
        """Discard everything that is not committed."""
        self._tail = self._state = self._inputs = None
        self._rows = {}

    def _move_to(self, device: torch.device) -> None:
        """Move the committed state to the rows' device, as it may come from a cache on another device."""
        parts = (self.committed.tail, self.committed.state)
        if any(part is not None and part.device != device for part in parts):
            self.committed = self.committed.on(device)

    def _after_tail(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [K - 1 + n, C]: the preceding inputs, followed by rows [n, C]."""
        tail = self.committed.tail if self._tail is None else self._tail
        if tail is None:
            tail = rows.new_zeros(self._taps - 1, rows.shape[1])
        return torch.cat([tail, rows])


def _appended(kept: torch.Tensor | None, rows: torch.Tensor, before: int) -> torch.Tensor:
    """Return the first `before` kept rows followed by `rows`, never as a view of a larger tensor."""
    return rows.clone() if kept is None or not before else torch.cat([kept[:before], rows])

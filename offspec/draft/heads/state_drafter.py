"""Drafting with a layer that extrapolates the target's states: cache entries and the states kept for them.

Entry i pairs the state of position i with the token at i + 1; the layer's output predicts the state of i + 1.
Entries of committed tokens use the target's real states and stay in the layer's cache. Entries of a tree's
nodes use the output of their parent as a state: they are dropped with the tree, and recomputed from the
target's states (as in EAGLE, arXiv 2401.15077).

Letters: T rows, E width of a state, V vocabulary, W nodes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from offspec.draft.base import Children, Drafter, Features, RequiredStates, Scorer, score_children
from offspec.draft.cache_rows import TreeRows
from offspec.draft.growing_tree import GrowingTree
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT
from offspec_kernels.chunks import split_evenly

_CHUNK = 256  # rows of a long prompt that go through the layer together


class StateLayer(Protocol):
    """Interface of such a head. `forward` adds rows to `cache`."""

    cache: TreeCache

    def fork(self) -> "StateLayer":
        """Return a layer with the same weights and its own empty cache. Closing it does not free the
        weights.
        """

    def states(self, features: Features) -> torch.Tensor:
        """Return the states [n, E] of the positions of `features`."""

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """Return the states [T, E] that follow `states` [T, E] after `tokens` [T]."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Map states [n, E] returned by `forward` to logits [n, V], -inf for tokens the head lacks.

        The result is valid until the next call.
        """

    def close(self) -> None: ...


class StateBuffer:
    """States of positions [start, end), in memory that is allocated at once and grows if needed."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty(rows, size, dtype=dtype, device=device)
        self.start = self.end = 0

    def empty_copy(self) -> "StateBuffer":
        """Return an empty buffer of the same capacity, for one more sequence."""
        rows = self._rows
        return StateBuffer(len(rows), rows.shape[1], rows.dtype, rows.device)

    def of(self, start: int, end: int) -> torch.Tensor:
        return self._rows[start - self.start : end - self.start]

    def append(self, start: int, states: torch.Tensor) -> None:
        """Append the states of positions from `start`, which is the end, or any position if the buffer is
        empty.
        """
        if self.start == self.end:
            self.start = self.end = start
        assert start == self.end
        self.end += len(states)
        count = self.end - self.start
        if count > len(self._rows):
            grown = self._rows.new_empty(2 * count, self._rows.shape[1])
            grown[: start - self.start] = self._rows[: start - self.start]
            self._rows = grown
        self.of(start, self.end).copy_(states)

    def cut(self, end: int) -> None:
        """Forget the states of the positions from `end` on."""
        self.end = max(min(self.end, end), self.start)


class StateDrafter(Drafter):
    """Drafts with a `StateLayer`, to any requested depth.

    States of committed positions are kept in addition to the cache: after a rewind, the last state meets
    another token. If states of the first positions are missing, entries begin with the first state.
    """

    def __init__(
        self,
        name: str,
        layer: StateLayer,
        required_states: RequiredStates,
        state_buffer: StateBuffer,
        device: torch.device,
    ) -> None:
        self.name, self.required_states = name, required_states
        self._layer, self._known, self._device = layer, state_buffer, device
        self._look: Callable[[], None] | None = None
        self._ids: list[int] = []
        self._rows = TreeRows()  # of nodes below the root; the root's entry belongs to a committed token
        self._positions: list[int] = []  # of the tree's rows
        self._outputs: dict[int, torch.Tensor] = {}  # of expanded nodes, [E]

    def fork(self, target: TreeCache) -> "StateDrafter":
        return StateDrafter(
            self.name, self._layer.fork(), self.required_states, self._known.empty_copy(), self._device
        )

    def set_cancel_check(self, check_cancelled: Callable[[], None] | None) -> None:
        self._look = check_cancelled

    def start(self, ids: Sequence[int]) -> None:
        self.rewind(len(ids) - 1)
        self._ids = list(ids)

    @torch.no_grad()
    def observe(self, features: Features) -> None:
        """Keep the states only, fused to their small width: entries are made when they are needed."""
        if not len(features):
            return
        if features.start > self._known.end:
            self._keep(0, 0)
        self._keep(features.start, features.start)
        self._known.append(features.start, self._layer.states(features))

    @torch.no_grad()
    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """Expand level by level, if one call contains a node and its parent: each needs its parent's
        output.
        """
        outputs = self._outputs
        if not outputs:
            self._catch_up()
        if ROOT not in outputs:
            return Children.none(len(nodes))
        waiting = [node for node in nodes if node not in outputs]
        while waiting:
            self._extend(candidates, [node for node in waiting if int(candidates.parent[node]) in outputs])
            waiting = [node for node in waiting if node not in outputs]
        logits = self._layer.logits(torch.stack([outputs[node] for node in nodes]))
        return score_children(scorer, logits, candidates, nodes, len(self._ids) - 1)

    def _catch_up(self) -> None:
        """Make the missing entries of committed tokens; the last of them is the root's."""
        root, cache, known = len(self._ids) - 1, self._layer.cache, self._known
        first = known.start + cache.length
        if known.end < root or first >= root:
            return
        tokens = torch.tensor(self._ids[first + 1 :], device=self._device)
        context = TreeContext(
            prefix=cache.length,
            position=torch.arange(first, root, device=self._device),
            causal=root - first,
            ancestors=torch.zeros(0, 0, dtype=torch.bool),
            exact=False,
        )
        for part in split_evenly(0, root - first, _CHUNK):
            if self._look is not None:
                self._look()
            states = known.of(first + part.start, first + part.stop)
            out = self._layer.forward(tokens[part], states, context)
        cache.commit(root - first, [])
        self._outputs[ROOT] = out[-1]

    def _extend(self, candidates: GrowingTree, nodes: Sequence[int]) -> None:
        """Make entries of nodes whose parents have theirs."""
        assert nodes, "a node was expanded before its parent"
        if self._look is not None:
            self._look()
        self._rows.place(candidates, nodes)
        self._positions += [len(self._ids) - 2 + depth for depth in candidates.depth[nodes].tolist()]
        tokens, context = TreeContext.of_step(
            candidates.token[nodes].tolist(),
            self._positions,
            self._rows.sees,
            prefix=self._layer.cache.length,
            causal=0,
            device=self._device,
            exact=False,
        )
        states = torch.stack([self._outputs[parent] for parent in candidates.parent[nodes].tolist()])
        self._outputs.update(zip(nodes, self._layer.forward(tokens, states, context), strict=True))

    def rewind(self, length: int) -> None:
        self._keep(length, length - 1)  # the last entry's token is at `length`

    def _keep(self, states: int, entries: int) -> None:
        """Keep the states and entries of the first positions, and drop those of a tree."""
        cache = self._layer.cache
        cache.rewind(max(min(cache.length, entries - self._known.start), 0))
        self._known.cut(states)
        self._rows.clear()
        self._positions.clear()
        self._outputs.clear()

    def close(self) -> None:
        self._keep(0, 0)
        self._layer.close()
        self._known = StateBuffer(0, 0, torch.float32, self._device)

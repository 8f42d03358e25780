"""Drafting with a layer that extrapolates the target's states: entries, a tree of guesses, and what is kept.

Entry i pairs the state of position i with the token at i + 1; the layer's output is its guess at the state of
i + 1. Entries of committed tokens have the target's real states and stay in the layer's cache. Those of a
tree's nodes have the output of their parent in the place of a state: they are dropped when the tree is, and
made again from what the target says (as in EAGLE, arXiv 2401.15077).

Letters: T rows, E width of a state, V vocabulary, W nodes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from offspec.draft.base import Children, Drafter, Features, Scorer, Wants, score
from offspec.draft.cache_rows import TreeRows
from offspec.draft.growing_tree import GrowingTree
from offspec.model.attention import TreeContext
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT
from offspec_kernels.chunks import split_evenly

_CHUNK = 256  # rows of a long prompt that go through the layer together


class StateLayer(Protocol):
    """What such a head computes. Rows join `cache` with every `forward`."""

    cache: TreeCache

    def fork(self) -> "StateLayer":
        """The same weights over an empty cache of its own. Closing it leaves them alone."""

    def states(self, features: Features) -> torch.Tensor:
        """States [n, E] of the positions of `features`."""

    def forward(self, tokens: torch.Tensor, states: torch.Tensor, context: TreeContext) -> torch.Tensor:
        """The states [T, E] that follow `states` [T, E] once `tokens` [T] are said."""

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """[n, E] that `forward` returned to [n, V], -inf where the head knows no such token. A loan."""

    def close(self) -> None: ...


class KnownStates:
    """The states of positions [start, end), in memory that is taken at once and grows where it must."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = torch.empty(rows, size, dtype=dtype, device=device)
        self.start = self.end = 0

    def another(self) -> "KnownStates":
        """Room for as many of one more sequence, of which none are known."""
        rows = self._rows
        return KnownStates(len(rows), rows.shape[1], rows.dtype, rows.device)

    def of(self, start: int, end: int) -> torch.Tensor:
        return self._rows[start - self.start : end - self.start]

    def append(self, start: int, states: torch.Tensor) -> None:
        """Those of the positions from `start`, which is the end; or anywhere, where none are known."""
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
        """Forget those of the positions from `end` on."""
        self.end = max(min(self.end, end), self.start)


class StateDrafter(Drafter):
    """Drafts with a `StateLayer`, as many levels deep as it is asked.

    States of committed positions are kept beside the cache: after a rewind the last of them meets another
    token. Where the first positions were never given, entries begin where states do.
    """

    def __init__(
        self, name: str, layer: StateLayer, wants: Wants, known: KnownStates, device: torch.device
    ) -> None:
        self.name, self.wants = name, wants
        self._layer, self._known, self._device = layer, known, device
        self._look: Callable[[], None] | None = None
        self._ids: list[int] = []
        self._rows = TreeRows()  # of nodes below the root, whose own entry is a committed one
        self._positions: list[int] = []  # of the tree's rows
        self._outputs: dict[int, torch.Tensor] = {}  # of expanded nodes, [E]

    def fork(self, target: TreeCache) -> "StateDrafter":
        return StateDrafter(self.name, self._layer.fork(), self.wants, self._known.another(), self._device)

    def watch(self, look: Callable[[], None] | None) -> None:
        self._look = look

    def start(self, ids: Sequence[int]) -> None:
        self.rewind(len(ids) - 1)
        self._ids = list(ids)

    @torch.no_grad()
    def observe(self, features: Features) -> None:
        """Keeps the states alone, narrow as they are once fused: entries are made when they are needed."""
        if not len(features):
            return
        if features.start > self._known.end:
            self._keep(0, 0)
        self._keep(features.start, features.start)
        self._known.append(features.start, self._layer.states(features))

    @torch.no_grad()
    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        """Level by level, where nodes of one call stand below one another: each needs its parent's output."""
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
        return score(scorer, logits, candidates, nodes, len(self._ids) - 1)

    def _catch_up(self) -> None:
        """Make the entries of committed tokens that the cache lacks, the last of them the root's."""
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
        assert nodes, "a node was asked for before its parent"
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
        """Keep the states and entries of the first positions, and nothing of a tree."""
        cache = self._layer.cache
        cache.rewind(max(min(cache.length, entries - self._known.start), 0))
        self._known.cut(states)
        self._rows.clear()
        self._positions.clear()
        self._outputs.clear()

    def close(self) -> None:
        self._keep(0, 0)
        self._layer.close()
        self._known = KnownStates(0, 0, torch.float32, self._device)

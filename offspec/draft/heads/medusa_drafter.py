"""Drafting with Medusa heads (Cai et al. 2024, arXiv 2401.10774), each of which guesses one position.

From h, the target's final hidden state at position t, whose token t + 1 is the root of the tree, head i goes
through its layers, h <- h + SiLU(W h + b), and guesses token t + 2 + i: a child of the nodes at depth i,
whatever the path to them.

Letters: H hidden size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import linear, silu

from offspec.draft.base import Children, Scorer
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.heads.guesses import LastStateDrafter, arranged, nothing
from offspec.model.cache import TreeCache
from offspec.model.parts import TargetParts


@dataclass(frozen=True, slots=True)
class MedusaHead:
    """One head: weight [H, H] and bias [H] of its layers, output [V, H] or None for the target's."""

    layers: tuple[tuple[torch.Tensor, torch.Tensor | None], ...]
    output: torch.Tensor | None

    def state(self, hidden: torch.Tensor) -> torch.Tensor:
        """[H] to [H], what the output matrix is given."""
        for weight, bias in self.layers:
            hidden = hidden + silu(linear(hidden, weight, bias))
        return hidden


class MedusaDrafter(LastStateDrafter):
    """Drafts with Medusa heads. tokens: the token of each output row [rows], None where they are in order."""

    def __init__(
        self,
        name: str,
        heads: Sequence[MedusaHead],
        parts: TargetParts,
        tokens: torch.Tensor | None = None,
    ) -> None:
        super().__init__(name)
        self._heads = tuple(heads)
        self._parts = parts
        self._tokens = tokens
        self._root = 0
        self._logits: dict[int, torch.Tensor] = {}  # [V] by depth, of this tree

    def fork(self, target: TreeCache) -> Self:
        twin = super().fork(target)
        twin._logits = {}
        return twin

    def start(self, ids: Sequence[int]) -> None:
        self._root = len(ids) - 1
        self._logits.clear()

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        state = self._last.before(self._root)
        depths: list[int] = candidates.depth[nodes].tolist()
        # All nodes of a depth have the same children, unless penalties tell their paths apart.
        keys = list(range(len(nodes))) if scorer.needs_paths else depths
        asked = {key: i for i, key in enumerate(keys) if depths[i] < len(self._heads)}
        if state is None or not asked:
            return nothing(len(nodes))
        levels = [depths[i] for i in asked.values()]
        found = scorer.children(
            torch.stack([self._level(depth, state) for depth in levels]),
            [candidates.path_tokens(nodes[i]) for i in asked.values()] if scorer.needs_paths else [],
            [self._root + 1 + depth for depth in levels],
            levels,
        )
        place = {key: row for row, key in enumerate(asked)}
        return arranged(found, [place.get(key, -1) for key in keys])

    def _level(self, depth: int, state: torch.Tensor) -> torch.Tensor:
        """Logits [V] of the children of all nodes at a depth."""
        if depth not in self._logits:
            output = self._heads[depth].output
            if output is not None:
                self._logits[depth] = self._spread(linear(self._heads[depth].state(state), output))
            else:  # the target's head is large: read once for all who share it
                shared = [i for i, head in enumerate(self._heads) if head.output is None]
                rows = self._parts.project(torch.stack([self._heads[i].state(state) for i in shared]))
                self._logits |= zip(shared, rows, strict=True)
        return self._logits[depth]

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        if self._tokens is None:
            return logits
        spread = logits.new_full((self._parts.vocab_size,), -torch.inf)
        return spread.index_copy_(0, self._tokens, logits)

    def close(self) -> None:
        self._heads = ()
        self._logits.clear()

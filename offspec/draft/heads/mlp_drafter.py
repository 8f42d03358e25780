"""Drafting with an MLPSpeculator (Wertheimer et al. 2024, arXiv 2404.19124), whose heads know the path.

s is the target's final hidden state at the position before the root; stage i takes the state of a node's
parent and the node's token to the node's own state, s <- GELU(LN_i(P_i s + r E_i[token])), and guesses its
children from it. r weighs the two so that the state's share of the variance halves over all stages.

Letters: W nodes, H hidden size, I inner size, V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.nn.functional import embedding, gelu, linear

from offspec.draft.base import Children, Scorer, score
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.heads.guesses import LastStateDrafter, arranged, nothing
from offspec.model.cache import TreeCache
from offspec.sampling.token_tree import ROOT

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class MLPStage:
    """One stage: embedding [V, I], projection [I, H or I], output [V, I], norm's weight and bias [I]."""

    embedding: torch.Tensor
    projection: torch.Tensor
    output: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor

    def states(self, before: torch.Tensor, tokens: torch.Tensor, ratio: float) -> torch.Tensor:
        """[W, H or I] states of the parents and tokens [W] to states [W, I]."""
        mixed = linear(before, self.projection).add_(embedding(tokens, self.embedding), alpha=ratio)
        return gelu(_normed(mixed) * self.scale + self.shift)


def token_ratio(inner: int, stages: int) -> float:
    """What a token's embedding is multiplied with, beside a state: r in the words of this module."""
    state = math.pow(0.5, 0.5 / stages)
    return math.sqrt((1 - state**2) * inner / 2) / state


class MLPDrafter(LastStateDrafter):
    """Drafts with the stages of an MLPSpeculator. scale_input: whether the first state is normed."""

    def __init__(self, name: str, stages: Sequence[MLPStage], scale_input: bool) -> None:
        super().__init__(name)
        self._stages = tuple(stages)
        self._ratio = token_ratio(len(stages[0].projection), len(stages))
        self._scale_input = scale_input
        self._root = 0
        self._states: dict[int, torch.Tensor] = {}  # [I] by node, of this tree

    def fork(self, target: TreeCache) -> Self:
        twin = super().fork(target)
        twin._states = {}
        return twin

    def start(self, ids: Sequence[int]) -> None:
        self._root = len(ids) - 1
        self._states.clear()

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        start = self._last.before(self._root)
        depths: list[int] = candidates.depth[nodes].tolist()
        asked = [i for i, depth in enumerate(depths) if depth < len(self._stages)]
        if start is None or not asked:
            return nothing(len(nodes))
        logits = start.new_empty(len(asked), len(self._stages[0].output))
        for depth, stage in enumerate(self._stages):  # level by level: a chain may come in one call
            level = [row for row, i in enumerate(asked) if depths[i] == depth]
            if level:
                states = self._advance(candidates, [nodes[asked[row]] for row in level], stage, start)
                logits[level] = linear(states, stage.output)
        found = score(scorer, logits, candidates, [nodes[i] for i in asked], self._root)
        place = {i: row for row, i in enumerate(asked)}
        return arranged(found, [place.get(i, -1) for i in range(len(nodes))])

    def _advance(
        self, candidates: GrowingTree, nodes: Sequence[int], stage: MLPStage, start: torch.Tensor
    ) -> torch.Tensor:
        """The states [W, I] of nodes of one level, which are kept for their children."""
        if nodes[0] == ROOT:
            before = (_normed(start) / math.sqrt(2) if self._scale_input else start)[None]
        else:
            before = torch.stack([self._states[parent] for parent in candidates.parent[nodes].tolist()])
        last = len(stage.embedding) - 1  # the target's vocabulary may be padded beyond this one
        tokens = torch.from_numpy(candidates.token[nodes]).clamp_(max=last).to(before.device)
        states = stage.states(before, tokens, self._ratio)
        self._states |= zip(nodes, states, strict=True)
        return states

    def close(self) -> None:
        self._stages = ()
        self._states.clear()


def _normed(x: torch.Tensor) -> torch.Tensor:
    """[W, H] divided by the root of its mean square; nothing is subtracted, whatever the format calls it."""
    wide = x.float()  # squares of float16 overflow soon
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPSILON)).to(x.dtype)

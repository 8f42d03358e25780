"""A drafter that reads its scores from a table, and a lookup that knows one text."""

import math
from collections.abc import Sequence

import torch

from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Drafter, Scorer
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.model.cache import TreeCache
from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.noise import GumbelNoise
from offspec.sampling.token_tree import ROOT
from offspec_planners.acceptance import Calibration

VOCABULARY = 6


class TableDrafter(Drafter):
    """Logits [V, V] that depend on the last token only, and a record of calls."""

    name = "table"

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.steps: list[list[int]] = []
        self.rewound: list[int] = []

    def fork(self, target: TreeCache) -> "TableDrafter":
        return TableDrafter(self.table)

    def start(self, ids: Sequence[int]) -> None:
        self.steps = []

    def expand(self, candidates: GrowingTree, nodes: Sequence[int], scorer: Scorer) -> Children:
        known = {node for step in self.steps for node in step}
        for node in nodes:
            assert node == ROOT or int(candidates.parent[node]) in known, "the parent comes first"
            known.add(node)
        self.steps.append(list(nodes))
        logits = self.table[torch.from_numpy(candidates.token[nodes])]
        depths = candidates.depth[nodes].tolist()
        return scorer.children(logits, [[] for _ in nodes], [depth + 1 for depth in depths], depths)

    def rewind(self, length: int) -> None:
        self.rewound.append(length)

    def close(self) -> None: ...


def random_table(seed: int, spread: float = 2.0, size: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(size, size, generator=torch.Generator().manual_seed(seed)) * spread


def greedy_scorer(size: int = VOCABULARY, calibration: Calibration | None = None) -> Scorer:
    """Scorer of a request at temperature 0 without rules."""
    return Scorer(LogitsProcessor(SamplingParams(), size, []), None, calibration or Calibration())


class ChainLookup:
    """Lookup with one continuation, whose tokens all have the same probability; records its calls."""

    name = "chain"

    def __init__(self, chain: Sequence[int], probability: float) -> None:
        self.chain, self.log_prob = list(chain), math.log(probability)
        self.asked: list[list[int]] = []
        self.taught: list[list[int]] = []

    def fork(self) -> "ChainLookup":
        return ChainLookup(self.chain, math.exp(self.log_prob))

    def start(self, ids: Sequence[int]) -> None:
        self.asked = []

    def continuations(
        self, path: Sequence[int], noise: GumbelNoise | None, most: int, floor: float, max_depth: int
    ) -> Subtree:
        self.asked.append(list(path))
        if list(path) != self.chain[: len(path)]:
            return Subtree([], [], [])
        rest = self.chain[len(path) :][: min(most, max_depth, int(floor / self.log_prob))]
        return Subtree(list(range(-1, len(rest) - 1)), rest, [self.log_prob] * len(rest))

    def learn(self, tokens: Sequence[int]) -> None:
        self.taught.append(list(tokens))

    def rewind(self, length: int) -> None: ...

    def close(self) -> None: ...

"""A drafter that reads its scores off a table."""

import torch

from offspec.draft.base import Children, Scorer
from offspec.draft.growing_tree import GrowingTree

VOCABULARY = 6


class TableDrafter:
    """Next-token probabilities that depend on the last token alone, and a record of what was asked."""

    name = "table"

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.steps: list[list[int]] = []

    def start(self, ids: object) -> None:
        self.steps = []

    def expand(self, candidates: GrowingTree, nodes: list[int], scorer: Scorer) -> Children:
        assert all(candidates.parent[n] < 0 or candidates.asked[0, candidates.parent[n]] for n in nodes)
        self.steps.append(list(nodes))
        logits = self.table[torch.from_numpy(candidates.token[nodes])]
        return scorer.children(logits, [[] for _ in nodes], [int(d) + 1 for d in candidates.depth[nodes]])

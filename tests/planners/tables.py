"""A draft whose next token depends on the last one alone."""

from collections.abc import Sequence

import torch

from offspec.draft.base import Children, Features, Scorer, Wants
from offspec.draft.growing_tree import GrowingTree
from offspec.sampling.token_tree import ROOT

VOCABULARY = 12


class TableDrafter:
    """Logits by the last token [V, V], and a record of what was asked."""

    name = "table"
    between = None
    wants = Wants()

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.steps: list[list[int]] = []

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

    def commit(self, nodes: Sequence[int]) -> None: ...

    def observe(self, features: Features) -> None: ...

    def adopt(self) -> None: ...

    def rewind(self, length: int) -> None: ...

    def close(self) -> None: ...


def random_table(seed: int, spread: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCABULARY, VOCABULARY, generator=generator) * spread

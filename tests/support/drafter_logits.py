"""Logits of a single drafter at nodes chosen by a test, without growing a tree."""

from collections.abc import Sequence

import torch

from offspec.core.config import SamplingParams
from offspec.draft.base import Children, Drafter, Scorer
from offspec.draft.growing_tree import GrowingTree, Subtree
from offspec.sampling.logits_processor import LogitsProcessor
from offspec_planners.acceptance import Calibration
from tests.support.tiny_models import VOCABULARY

# Below the root (node 0): a fork, a chain of three, and a fork deeper down.
PARENTS = (0, 0, 1, 3, 3, 2)
TOKENS = (7, 30, 41, 5, 88, 12)
CALLS = ([0], [1, 2], [3, 4, 5], [6])  # in the order in which a tree grows
CHAINS = ([0, 1, 3, 4], [2, 5, 6])  # a parent and its child in one call


class RecordingScorer(Scorer):
    """Records the logits that it gets, and the absolute positions of the children."""

    def __init__(self) -> None:
        super().__init__(LogitsProcessor(SamplingParams(), VOCABULARY, []), None, Calibration(), children=4)
        self.recorded_logits: list[torch.Tensor] = []
        self.positions: list[int] = []

    def children(
        self,
        logits: torch.Tensor,
        paths: Sequence[Sequence[int]],
        positions: Sequence[int],
        depths: Sequence[int] = (0,),
        there: torch.Tensor | None = None,
    ) -> Children:
        self.recorded_logits += logits.to("cpu", copy=True)
        self.positions += positions
        assert there is None or there.tolist() == list(positions)
        return super().children(logits, paths, positions, depths, there)


def tree_below(token: int) -> GrowingTree:
    """Nodes 1 to 6 below a root with this token, in the shape above."""
    candidates = GrowingTree(token)
    subtree = Subtree([parent - 1 for parent in PARENTS], TOKENS, [-1.0] * len(TOKENS))
    candidates.graft(0, subtree, source=0)
    return candidates


@torch.no_grad()
def node_logits(drafter: Drafter, ids: Sequence[int], calls: Sequence[Sequence[int]] = CALLS) -> torch.Tensor:
    """Return logits [7, V] at the nodes of the tree below the last id, in order, on the CPU."""
    candidates, hearing = tree_below(ids[-1]), RecordingScorer()
    drafter.start(ids)
    for nodes in calls:
        drafter.expand(candidates, list(nodes), hearing)
    asked = [node for nodes in calls for node in nodes]
    assert hearing.positions == [len(ids) + int(candidates.depth[node]) for node in asked]
    return torch.stack([logits for _, logits in sorted(zip(asked, hearing.recorded_logits, strict=True))])


def paths() -> list[list[int]]:
    """Tokens from the root to each node."""
    candidates = tree_below(0)
    return [candidates.path_tokens(node) for node in range(candidates.count)]

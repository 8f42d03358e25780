"""Growing a token tree: best first, by the calibrated probability of each path.

For a tree that must be built before the target speaks, the expected number of accepted tokens is the sum
over its nodes of the probability that the target takes the path to them. So the best tree of N nodes is
the N likeliest paths, and since a score never rises along a path, expanding the best unexpanded node first
finds them (SpecExec: Svirschevski et al. 2024; the stopping rule is in the manner of OPT-Tree: Wang et al.
2024). W nodes are expanded together, because a draft step costs about as much for 32 nodes as for one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offspec.draft.base import Children, Drafter, Scorer
from offspec.timeline import OFF, Timeline
from offspec.tree import ROOT, Candidates, TokenTree


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """budget: most nodes of the tree, root included; width: nodes a draft step expands.

    min_gain: stop when one more step is expected to add less than this share of the expected tokens.
    """

    budget: int
    width: int
    min_gain: float = 0.01

    @property
    def max_expanded(self) -> int:
        """Most nodes expanded for one tree: a bound on the draft's work and on the rows of its cache."""
        return 2 * self.budget + self.width


@dataclass(frozen=True, slots=True)
class Growth:
    """A grown tree, the candidate behind each of its nodes, and what calibration can learn from."""

    tree: TokenTree
    candidates: NDArray[np.int64]
    steps: int
    children: dict[int, tuple[Children, int]]

    def learn(self, scorer: Scorer, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Fit the draft's temperature to the tokens that the target picked at these tree nodes."""
        for node, token in zip(nodes, tokens, strict=True):
            found = self.children.get(int(self.candidates[node]))
            if found is None:
                continue
            children, row = found
            hits = np.flatnonzero(children.token[row] == token)
            rank = int(hits[0]) if len(hits) else None
            scorer.fit.observe(children.x[row], children.log_prob[row], rank)


def grow(
    drafter: Drafter,
    scorer: Scorer,
    ids: Sequence[int],
    policy: GrowthPolicy,
    max_depth: int,
    timeline: Timeline = OFF,
) -> Growth:
    """A tree below the last of the committed ids, no deeper than `max_depth` tokens."""
    candidates = Candidates(ids[-1])
    seen: dict[int, tuple[Children, int]] = {}
    steps, expected = 0, 1.0
    best = candidates.best(policy.budget)
    drafter.start(ids)
    while len(seen) + policy.width <= policy.max_expanded:
        nodes = _frontier(candidates, best, policy.width, max_depth)
        # No step adds more than the paths it extends are worth.
        if not nodes or (steps and _worth(candidates, nodes) < policy.min_gain * expected):
            break
        with timeline.span("draft", "step", width=len(nodes)):
            children = drafter.expand(candidates, nodes, scorer)
        candidates.expanded[nodes] = True
        # What is no better than the last of a full tree can never be in it: the best only get better.
        floor = float(candidates.score[best].min()) if len(best) == policy.budget else -math.inf
        candidates.extend(np.array(nodes), children.token, children.log_prob, floor)
        seen.update({node: (children, row) for row, node in enumerate(nodes)})
        steps += 1
        best = candidates.best(policy.budget)
        expected = float(np.exp(candidates.score[best]).sum())
    return Growth(candidates.tree(best), best, steps, seen)


def _frontier(candidates: Candidates, best: NDArray[np.int64], width: int, max_depth: int) -> list[int]:
    """The `width` best unexpanded nodes that are in the tree as it stands and may have children."""
    if max_depth < 1:
        return []
    open_nodes = best[~candidates.expanded[best] & (candidates.depth[best] < max_depth)]
    order = np.argsort(-candidates.score[open_nodes], kind="stable")[:width]
    return [int(node) for node in np.sort(open_nodes[order])]


def _worth(candidates: Candidates, nodes: list[int]) -> float:
    return float(np.exp(candidates.score[nodes]).sum())


def no_growth(root_token: int) -> Growth:
    """The tree of plain decoding."""
    return Growth(TokenTree.single(root_token), np.array([ROOT]), 0, {})

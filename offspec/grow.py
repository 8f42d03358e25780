"""Growing a token tree: best first, by the calibrated probability of each path.

For a tree that must be built before the target speaks, the expected number of accepted tokens is the sum
over its nodes of the probability that the target takes the path to them. So the best tree of N nodes is
the N likeliest paths, and since a score never rises along a path, expanding the best unexpanded node first
finds them (SpecExec: Svirschevski et al. 2024; the stopping rule is in the manner of OPT-Tree: Wang et al.
2024). W nodes are expanded together, because a draft step costs about as much for 32 nodes as for one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offspec.draft.base import Children, Drafter, Scorer
from offspec.timeline import OFF, Timeline
from offspec.tree import ROOT, Candidates, TokenTree
from offspec_planners.best_first import Grown, best_size, max_expanded, pays, promising
from offspec_planners.cost import PassCosts

_RECORDED = 128  # nodes


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """budget: most nodes of the tree, root included; width: nodes a draft step expands.

    min_gain: stop when one more step is expected to add less than this share of the expected tokens. costs:
    where given, stop instead when no step can raise tokens per second, and verify as many nodes as give the
    most. record: grow on to so many nodes for the record, whatever it costs, if that is more than the budget.
    """

    budget: int
    width: int
    min_gain: float = 0.01
    costs: PassCosts | None = None
    record: int = 0

    @property
    def grown(self) -> int:
        """Most nodes that are grown, of which the best `budget` are verified."""
        return max(self.budget, self.record)

    @property
    def recording(self) -> bool:
        return self.grown > self.budget

    @property
    def max_expanded(self) -> int:
        """Most nodes expanded for one tree: a bound on the draft's work and on the rows of its cache."""
        return max_expanded(self.grown, self.width)


@dataclass(frozen=True, slots=True)
class Growth:
    """A grown tree, the candidate behind each of its nodes, and what calibration can learn from.

    recorded: the larger tree that was grown for the record, where it came to its full size.
    """

    tree: TokenTree
    candidates: NDArray[np.int64]
    steps: int
    children: dict[int, tuple[Children, int]]
    recorded: Grown | None = None

    def learn(self, scorer: Scorer, nodes: Sequence[int], tokens: Sequence[int]) -> None:
        """Teach the calibration which tokens the target picked at these tree nodes, the walk in order.

        A walked node that was not expanded says nothing about ranks. Where the text ended in the middle of
        the tree, only the levels down to that end count as promised.
        """
        calibration = scorer.calibration
        for depth, (node, token) in enumerate(zip(nodes, tokens, strict=True)):
            found = self.children.get(int(self.candidates[node]))
            if found is None:
                continue
            children, row = found
            hits = np.flatnonzero(children.token[row] == token)
            rank = int(hits[0]) if len(hits) else None
            calibration.observe(depth, children.x[row], children.log_prob[row], rank)
        promised = self.tree.score
        if tokens[-1] in self.tree.children(nodes[-1]):
            promised = promised[self.tree.depth < len(tokens)]
        calibration.end_pass(float(np.exp(promised).sum()), len(tokens))
        if self.recorded is not None:
            calibration.remember(self.recorded)


def grow(
    drafter: Drafter,
    scorer: Scorer,
    ids: Sequence[int],
    policy: GrowthPolicy,
    max_depth: int,
    timeline: Timeline = OFF,
    between: Callable[[], None] | None = None,
) -> Growth:
    """A tree below the last of the committed ids, no deeper than `max_depth` tokens.

    between: called before every step; what it raises breaks the growth off.
    """
    candidates = Candidates(ids[-1])
    seen: dict[int, tuple[Children, int]] = {}
    costs, steps = policy.costs, 0
    seconds = costs.start if costs else 0.0
    beyond = False  # whether what is grown is for the record alone, and no cost of this tree
    best = candidates.best(policy.grown)
    drafter.start(ids)
    while len(seen) + policy.width <= policy.max_expanded:
        nodes = _frontier(candidates, best, policy, max_depth)
        if not nodes or (steps and not _pays(candidates, best, nodes, seconds, policy)):
            break
        if costs and policy.recording and not beyond:
            beyond = not pays(candidates.score[best], candidates.score[nodes], seconds, costs, 0.0)
        if between is not None:
            between()
        with timeline.span("draft", "step", width=len(nodes)):
            children = drafter.expand(candidates, nodes, scorer)
        candidates.expanded[nodes] = True
        # What is no better than the last of a full tree can never be in it: the best only get better.
        floor = float(candidates.score[best].min()) if len(best) == policy.grown else -math.inf
        candidates.extend(np.array(nodes), children.token, children.log_prob, floor)
        seen.update({node: (children, row) for row, node in enumerate(nodes)})
        seconds += float(costs.step_seconds(len(nodes))) if costs and not beyond else 0.0
        steps += 1
        best = candidates.best(policy.grown)
    kept = candidates.best(policy.budget)
    if costs is not None:
        kept = candidates.best(best_size(-np.sort(-candidates.score[kept]), seconds, costs))
    recorded = None
    if policy.recording and len(best) == policy.record and candidates.depth[best].max() < max_depth:
        record = candidates.tree(best)
        recorded = Grown(record.parent.astype(np.int32), record.score.astype(np.float32))
    return Growth(candidates.tree(kept), kept, steps, seen, recorded)


def _frontier(
    candidates: Candidates, best: NDArray[np.int64], policy: GrowthPolicy, max_depth: int
) -> list[int]:
    """The best unexpanded nodes, `width` at most, that are in the tree and may have children worth having."""
    if max_depth < 1:
        return []
    open_nodes = best[~candidates.expanded[best] & (candidates.depth[best] < max_depth)]
    order = np.argsort(-candidates.score[open_nodes], kind="stable")[: policy.width]
    nodes = np.sort(open_nodes[order])
    probability, tree = (np.exp(candidates.score[some], dtype=np.float64) for some in (nodes, best))
    worth = promising(probability, tree, policy.grown, policy.min_gain)
    return [int(node) for node in nodes[worth]]


def _pays(
    candidates: Candidates, best: NDArray[np.int64], nodes: list[int], seconds: float, policy: GrowthPolicy
) -> bool:
    """Whether to expand these nodes, after so many seconds of drafting."""
    score = candidates.score
    if policy.recording:
        # A record must be whole, however narrow its steps: `min_gain` is asked of so many nodes together.
        return pays(score[best], score[nodes], seconds, None, policy.min_gain * len(nodes) / _RECORDED)
    return pays(score[best], score[nodes], seconds, policy.costs, policy.min_gain)


def no_growth(root_token: int) -> Growth:
    """The tree of plain decoding."""
    return Growth(TokenTree.single(root_token), np.array([ROOT]), 0, {})

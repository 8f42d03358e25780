"""Growing a token tree best-first, by the calibrated probability of each path.

For a tree that is built before the target's pass, the expected number of accepted tokens is the sum over its
nodes of the probability that the target takes the path to them. So the best tree of N nodes is the N
likeliest paths, and since a score never rises along a path, expanding the best unexpanded node first finds
them (SpecExec: Svirschevski et al. 2024; the stopping rule follows OPT-Tree: Wang et al. 2024). W nodes are
expanded together, because a draft step costs about as much for 32 nodes as for one.

Several sources share one heap. Lookups propose first, and drafters may expand a chain found by a lookup as a
whole: one step scores every token of it and looks for alternatives. If the format of an answer allows only
one token, that token enters the tree with its parent, at no cost and without a draft step.

Trees of several sequences that are verified in one pass share its rows: a node has the same value in any
tree. So one draft step expands the best nodes of all trees, and the best of all are verified.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.lockstep import grow_in_lockstep
from offspec.draft.grow.result import GrownTree
from offspec.draft.grow.tree_grower import GrowthPolicy, TreeGrower
from offspec.draft.mix.mixture import Mixture
from offspec_planners.shared_budget import best_width, share


def grow(
    mixture: Mixture,
    ids: Sequence[int],
    policy: GrowthPolicy,
    max_depth: int,
    check_cancelled: Callable[[], None] | None = None,
) -> GrownTree:
    """Grow a tree best-first (SpecExec, arXiv 2406.02532) below the last of the committed ids.

    Args:
        mixture: The draft sources.
        ids: Committed ids, the last of which is the root.
        policy: When to stop.
        max_depth: Maximum levels below the root.
        check_cancelled: Called before every step; an exception it raises cancels the growth.
    """
    growing = TreeGrower(mixture, ids, policy, max_depth, check_cancelled=check_cancelled)
    grow_in_lockstep([growing], _as_alone)
    return growing.grown(growing.size())


def grow_forest(
    trees: Sequence[TreeGrower],
    most: int | None = None,
    floor: int = 1,
    alone: int = 0,
    timeline: Timeline = OFF,
) -> list[GrownTree]:
    """Grow trees of several sequences together and keep the best nodes of all.

    Apart from its size, each tree is the same as if grown alone. Costs come from the first tree that has
    some. No tree is recorded unless it is the only one.

    Args:
        trees: Trees, none of which has begun.
        most: Total nodes that are verified; by default as many as the budgets of all trees allow.
        floor: Nodes that each tree keeps at least, if it has as many, however likely those of others are.
        alone: Sequences that take part in the pass without a tree.
        timeline: Records steps of several trees.
    """
    if not trees:
        return []
    if len(trees) == 1 and not alone:
        grow_in_lockstep(trees, _as_alone)
        return [trees[0].grown(trees[0].size())]
    forest = _Forest(trees, alone)
    grow_in_lockstep(trees, forest.decide, timeline)
    scores = [tree.descending() for tree in trees]
    sizes = share([*scores, *[np.zeros(1)] * alone], forest.seconds, forest.costs, most, floor)
    return [tree.grown(size) for tree, size in zip(trees, sizes, strict=False)]


def _as_alone(offers: Sequence[tuple[TreeGrower, list[int]]]) -> list[list[int] | None]:
    return [tree.decide(nodes) for tree, nodes in offers]


class _Forest:
    """Trees that are verified in one pass. seconds: planned seconds of drafting all of them."""

    def __init__(self, trees: Sequence[TreeGrower], alone: int) -> None:
        self._trees, self._alone = trees, np.zeros(alone)
        for tree in trees:
            tree.set_shared()
        policy = next((tree.policy for tree in trees if tree.policy.costs is not None), trees[0].policy)
        self._pace, self._factor = policy.pace, policy.pace.factor
        self.costs = None if policy.costs is None else policy.costs.with_steps(self._factor)
        self._step: tuple[float, float] | None = None  # the current step: its start, and its planned seconds
        self.seconds = 0.0
        if self.costs is not None and any(0 in tree.growth_stats.predictions for tree in trees):
            self.seconds = self.costs.start

    def decide(self, offers: Sequence[tuple[TreeGrower, list[int]]]) -> list[list[int] | None]:
        """Choose the nodes of all offers that go into the next step: the number of best nodes that pays most.

        A tree that has not been expanded yet always has its root expanded.
        """
        now = time.perf_counter()
        if self._step is not None:
            since, predicted = self._step
            self._pace.observe(predicted, now - since)
        nodes = [(place, node) for place, (_, some) in enumerate(offers) for node in some]
        offered = np.concatenate([tree.score_of(some) for tree, some in offers])
        fresh = np.repeat(
            [not tree.growth_stats.predictions[0] for tree, _ in offers], [len(some) for _, some in offers]
        )
        order = np.lexsort((-offered, ~fresh))  # ties keep their order: a node before its descendants
        scores = np.concatenate([*(tree.scores for tree in self._trees), self._alone])
        gain = self._trees[0].policy.min_gain
        count = best_width(scores, offered[order], self.seconds, self.costs, gain)
        count = max(count, int(fresh.sum()))
        if not count:
            return [None] * len(offers)
        if self.costs is not None:
            seconds = float(self.costs.step_seconds(count))
            self.seconds += seconds
            # Some trees read their texts in the first step, which does not represent later ones.
            self._step = None if fresh.any() else (now, seconds / self._factor)
        chosen = list[list[int]]([] for _ in offers)
        for place, node in sorted(nodes[index] for index in order[:count].tolist()):
            chosen[place].append(node)
        return [*chosen]

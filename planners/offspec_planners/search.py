"""Which budget and width give most tokens a second: every pair tried on recorded trees.

A tree that the draft grew is replayed under each pair (`best_first.replay`), which says what it would have
cost and brought. Nothing is drafted or verified again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offspec_planners.acceptance import Calibration
from offspec_planners.best_first import Growing, Grown, replay
from offspec_planners.cost import PassCosts
from offspec_planners.plan.forecast import Choice
from offspec_planners.sequoia import TreeShape, choose_tree_shape

BUDGETS = (1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
WIDTHS = (4, 8, 16, 32, 64)
STATIC_WIDTH = 32  # of a shape's levels, which are known to be worth it

_ENDS = 1 / 8  # of the trees, at either end, left out of a mean
_TREES = 32  # of a forest, evenly taken: more change little
_AS_GOOD = 0.995  # of equals within this, the one that takes less room


@dataclass(frozen=True, slots=True)
class Outlook:
    """A choice, and the means over the trees behind it. draft: seconds of a pass that it drafts."""

    choice: Choice
    nodes: float
    depth: float
    steps: float
    draft: float


def outlook(calibration: Calibration, costs: PassCosts, budget: int, width: int) -> Outlook:
    """What a pass costs and yields with a budget and a width, on average over recorded trees.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Of passes and steps.
        budget: Most nodes verified in a pass.
        width: Most nodes expanded by a draft step.
    """
    trees = [Growing((), 1, 1.0, 0)]  # whatever the draft is like
    if budget > 1:
        trees = _usual([replay(tree, budget, width, costs) for tree in _some(calibration)])
    count = len(trees)
    drafts = [costs.draft_seconds(tree.widths) for tree in trees]
    seconds = sum(
        float(costs.iteration(draft, tree.nodes)) for draft, tree in zip(drafts, trees, strict=True)
    )
    tokens = sum(tree.expected for tree in trees) / count
    if budget > 1:
        tokens = max(1.0, tokens * calibration.correction)
    return Outlook(
        Choice(budget, width, tokens * count / seconds, tokens, seconds / count),
        nodes=sum(tree.nodes for tree in trees) / count,
        depth=sum(tree.depth for tree in trees) / count,
        steps=sum(len(tree.widths) for tree in trees) / count,
        draft=sum(drafts) / count,
    )


def _usual(trees: list[Growing]) -> list[Growing]:
    """All but those with the highest and lowest expectations.

    Where a text repeats itself, a tree is guessed as far as it has nodes. A few of these would rule the mean,
    and say nothing of what is usual.
    """
    ends = int(_ENDS * len(trees))
    return sorted(trees, key=lambda tree: tree.expected)[ends : len(trees) - ends]


def _some(calibration: Calibration) -> Sequence[Grown]:
    forest = calibration.forest
    step = max(1, math.ceil(len(forest) / _TREES))
    return forest[::step]


def sweep(
    calibration: Calibration,
    costs: PassCosts,
    budgets: Sequence[int] = BUDGETS,
    widths: Sequence[int] = WIDTHS,
) -> list[Outlook]:
    """The outlook of every budget with every width that is not above it.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Of passes and steps.
        budgets: Most nodes verified in a pass, `BUDGETS` by default.
        widths: Most nodes expanded by a draft step, `WIDTHS` by default.
    """
    return [
        outlook(calibration, costs, budget, width)
        for budget in budgets
        for width in ([width for width in widths if width <= budget] or [1])
    ]


def static_sweep(
    calibration: Calibration, costs: PassCosts, budgets: Sequence[int], width: int
) -> list[Outlook]:
    """The outlook of trees of one shape each, the best shape for each budget.

    Args:
        calibration: Acceptance of this target and draft.
        costs: Of passes and steps.
        budgets: Most nodes verified in a pass.
        width: Most nodes expanded by a draft step.
    """
    acceptance = calibration.acceptance()
    return [
        _static(choose_tree_shape(acceptance, costs, budget, width), costs, budget, width)
        for budget in budgets
    ]


def _static(shape: TreeShape, costs: PassCosts, budget: int, width: int) -> Outlook:
    steps = [len(nodes) for nodes in shape.steps(width)]
    draft = costs.draft_seconds(steps)
    seconds = float(costs.iteration(draft, len(shape)))
    choice = Choice(budget, width, shape.expected / seconds, shape.expected, seconds)
    return Outlook(choice, len(shape), shape.depth, len(steps), draft)


def best(outlooks: Sequence[Outlook]) -> Outlook:
    """The fastest; of those as good as it, the one with the smallest budget, then width."""
    most = max(found.choice.tok_per_s for found in outlooks)
    good = [found for found in outlooks if found.choice.tok_per_s >= _AS_GOOD * most]
    return min(good, key=lambda found: (found.choice.budget, found.choice.width))

"""Which budget and width give most tokens a second: every pair tried on recorded trees.

A tree that the draft grew is replayed under each pair (`tree_growth.replay`), which says what it would have
cost and brought. Nothing is drafted or verified again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan.forecast import Choice
from offspec_planners.sequoia import TreeShape, choose_tree_shape
from offspec_planners.tree_growth import Growing, Grown, best_nodes, replay

BUDGETS = (1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SHARED_BUDGETS = (1536, 2048, 3072, 4096)  # of passes that several sequences share, besides
WIDTHS = (4, 8, 16, 32, 64)
STATIC_WIDTH = 32  # of a shape's levels, which are known to be worth it

_ENDS = 1 / 8  # of the trees, at either end, left out of a mean
_TREES = 32  # of a forest, evenly taken: more change little
_Tree = TypeVar("_Tree", Grown, Growing)
_AS_GOOD = 0.995  # of equals within this, the one that takes less room


@dataclass(frozen=True, slots=True)
class Outlook:
    """A choice, and the means over passes behind it, of all their trees.

    depth: of one tree; draft: seconds of a pass that it drafts.
    """

    choice: Choice
    nodes: float
    depth: float
    draft: float


def outlook(
    calibration: Calibration, costs: PassCosts, budget: int, width: int, sequences: int = 1
) -> Outlook:
    """What a pass costs and yields with a budget and a width, on average over recorded trees.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Of passes and steps.
        budget: Most nodes verified in a pass, as many as there are sequences at least.
        width: Most nodes of a tree expanded by a draft step.
        sequences: That share passes and draft steps, and whose tokens are added up. Default 1.
    """
    costs = costs.for_sequences(sequences)
    trees = [Growing((), sequences, float(sequences), 0)]  # whatever the draft is like
    if budget > sequences:
        trees = _grown(calibration, costs, budget, width, sequences)
    count = len(trees)
    drafts = [costs.draft_seconds(tree.widths) for tree in trees]
    seconds = sum(
        float(costs.iteration(draft, tree.nodes)) for draft, tree in zip(drafts, trees, strict=True)
    )
    tokens = sum(tree.expected for tree in trees) / count
    if budget > sequences:
        tokens = max(float(sequences), tokens * calibration.correction)
    return Outlook(
        Choice(budget, width, tokens * count / seconds, tokens, seconds / count),
        nodes=sum(tree.nodes for tree in trees) / count,
        depth=sum(tree.depth for tree in trees) / count,
        draft=sum(drafts) / count,
    )


def _grown(
    calibration: Calibration, costs: PassCosts, budget: int, width: int, sequences: int
) -> list[Growing]:
    """Trees of usual passes: of one each, or of several that share the budget, each record in one pass."""
    records = calibration.forest[:: max(1, math.ceil(len(calibration.forest) / _TREES))]
    if sequences == 1:
        return _usual([replay((tree,), budget, width, costs) for tree in records], lambda tree: tree.expected)
    trees = _usual(records, lambda tree: best_nodes(tree, budget // sequences))
    passes = math.ceil(len(trees) / sequences)
    forests = [
        tuple(trees[(first + passes * place) % len(trees)] for place in range(sequences))
        for first in range(passes)
    ]
    return [replay(forest, budget, width, costs) for forest in forests]


def _usual(trees: Sequence[_Tree], expected: Callable[[_Tree], float]) -> list[_Tree]:
    """All but those with the highest and lowest expectations, in the order of these.

    Where a text repeats itself, a tree is guessed as far as it has nodes. A few of these would rule the mean,
    and say nothing of what is usual.
    """
    ends = int(_ENDS * len(trees))
    return sorted(trees, key=expected)[ends : len(trees) - ends]


def sweep(
    calibration: Calibration,
    costs: PassCosts,
    budgets: Sequence[int] = BUDGETS,
    widths: Sequence[int] = WIDTHS,
    sequences: int = 1,
) -> list[Outlook]:
    """The outlook of every budget with every width that is not above it.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Of passes and steps.
        budgets: Most nodes verified in a pass, `BUDGETS` by default.
        widths: Most nodes of a tree expanded by a draft step, `WIDTHS` by default.
        sequences: That share passes; each has an equal part of a budget, on average. Default 1.
    """
    return [
        outlook(calibration, costs, budget, width, sequences)
        for budget in budgets
        for width in ([width for width in widths if width * sequences <= budget] or [1])
    ]


def budgets_for(sequences: int, most: int) -> list[int]:
    """Budgets to try for passes of up to `most` nodes that so many sequences share: a root of each at least.

    No tree is tried with more nodes than one of the largest budget for a single one.
    """
    larger = [nodes for nodes in SHARED_BUDGETS if nodes <= sequences * BUDGETS[-1]]
    return [sequences, *(nodes for nodes in (*BUDGETS, *larger) if sequences < nodes <= most)]


def shared_budgets(sequences: int) -> list[int]:
    """Those beyond what is tried for a single sequence, the largest first."""
    return [nodes for nodes in budgets_for(sequences, SHARED_BUDGETS[-1])[::-1] if nodes > BUDGETS[-1]]


def static_sweep(
    calibration: Calibration, costs: PassCosts, budgets: Sequence[int], width: int, sequences: int = 1
) -> list[Outlook]:
    """The outlook of trees of one shape each, the best shape for each budget.

    Args:
        calibration: Acceptance of this target and draft.
        costs: Of passes and steps.
        budgets: Most nodes verified in a pass.
        width: Most nodes of a tree expanded by a draft step.
        sequences: That share passes, each with a tree of the shape for its part of a budget. Default 1.
    """
    acceptance = calibration.acceptance()
    return [
        _static(
            choose_tree_shape(acceptance, costs, budget // sequences, width), costs, budget, width, sequences
        )
        for budget in budgets
    ]


def _static(shape: TreeShape, costs: PassCosts, budget: int, width: int, sequences: int) -> Outlook:
    costs, nodes, tokens = costs.for_sequences(sequences), sequences * len(shape), sequences * shape.expected
    steps = [sequences * len(nodes) for nodes in shape.steps(width)]
    draft = costs.draft_seconds(steps)
    seconds = float(costs.iteration(draft, nodes))
    choice = Choice(budget, width, tokens / seconds, tokens, seconds)
    return Outlook(choice, nodes, shape.depth, draft)


def best(outlooks: Sequence[Outlook]) -> Outlook:
    """The fastest; of those as good as it, the one with the smallest budget, then width."""
    most = max(found.choice.tok_per_s for found in outlooks)
    good = [found for found in outlooks if found.choice.tok_per_s >= _AS_GOOD * most]
    return min(good, key=lambda found: (found.choice.budget, found.choice.width))

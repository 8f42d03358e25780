"""Search for the budget and width with the most tokens per second, trying every pair on recorded trees.

A tree grown by the draft is replayed under each pair (`tree_growth.replay`), which returns what it would have
cost and yielded. Nothing is drafted or verified again.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from offspec_planners.acceptance import Calibration
from offspec_planners.cost import PassCosts
from offspec_planners.plan.forecast import Choice
from offspec_planners.sequoia import TreeShape, choose_tree_shape
from offspec_planners.tree_growth import GrowthOutcome, RecordedTree, best_nodes, replay

BUDGETS = (1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
SHARED_BUDGETS = (1536, 2048, 3072, 4096)  # further budgets of passes shared by several sequences
WIDTHS = (4, 8, 16, 32, 64)
STATIC_WIDTH = 32  # width of a static tree's levels, which are known to pay

_ENDS = 1 / 8  # share of trees left out of a mean at either end
_TREES = 32  # trees taken evenly from a forest: more would change little
_Tree = TypeVar("_Tree", RecordedTree, GrowthOutcome)
_AS_GOOD = 0.995  # choices within this factor are equal; the smaller one is used


@dataclass(frozen=True, slots=True)
class SpeedForecast:
    """A choice, with means over its passes, of all their trees.

    depth: of one tree; draft: drafting seconds per pass.
    """

    choice: Choice
    nodes: float
    depth: float
    draft: float


def forecast_speed(
    calibration: Calibration, costs: PassCosts, budget: int, width: int, sequences: int = 1
) -> SpeedForecast:
    """Return average cost and yield of a pass with a budget and a width, over recorded trees.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Costs of passes and steps.
        budget: Maximum nodes verified in a pass, at least the number of sequences.
        width: Maximum nodes of a tree expanded by a draft step.
        sequences: Number of sequences that share passes and draft steps; their tokens are summed. Default 1.
    """
    costs = costs.for_sequences(sequences)
    trees = [GrowthOutcome((), sequences, float(sequences), 0)]  # for any draft
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
    return SpeedForecast(
        Choice(budget, width, tokens * count / seconds, tokens, seconds / count),
        nodes=sum(tree.nodes for tree in trees) / count,
        depth=sum(tree.depth for tree in trees) / count,
        draft=sum(drafts) / count,
    )


def _grown(
    calibration: Calibration, costs: PassCosts, budget: int, width: int, sequences: int
) -> list[GrowthOutcome]:
    """Grow typical trees: one per pass, or several that share the budget, each record in one pass."""
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
    """Drop trees with the highest and lowest expectations, and sort the rest by expectation.

    In repetitive text, nearly the whole tree is accepted. A few such trees would dominate the mean without
    being typical.
    """
    ends = int(_ENDS * len(trees))
    return sorted(trees, key=expected)[ends : len(trees) - ends]


def sweep(
    calibration: Calibration,
    costs: PassCosts,
    budgets: Sequence[int] = BUDGETS,
    widths: Sequence[int] = WIDTHS,
    sequences: int = 1,
) -> list[SpeedForecast]:
    """Return the speed forecast of every budget with every width up to it.

    Args:
        calibration: Recorded trees of this target and draft.
        costs: Costs of passes and steps.
        budgets: Maximum nodes verified in a pass, `BUDGETS` by default.
        widths: Maximum nodes of a tree expanded by a draft step, `WIDTHS` by default.
        sequences: Number of sequences that share passes, with equal parts of a budget on average. Default 1.
    """
    return [
        forecast_speed(calibration, costs, budget, width, sequences)
        for budget in budgets
        for width in ([width for width in widths if width * sequences <= budget] or [1])
    ]


def budgets_for(sequences: int, most: int) -> list[int]:
    """Return budgets to try for passes of up to `most` nodes shared by sequences: at least a root for each.

    No tree is tried with more nodes than the largest budget for a single sequence.
    """
    larger = [nodes for nodes in SHARED_BUDGETS if nodes <= sequences * BUDGETS[-1]]
    return [sequences, *(nodes for nodes in (*BUDGETS, *larger) if sequences < nodes <= most)]


def shared_budgets(sequences: int) -> list[int]:
    """Return the budgets beyond those tried for a single sequence, the largest first."""
    return [nodes for nodes in budgets_for(sequences, SHARED_BUDGETS[-1])[::-1] if nodes > BUDGETS[-1]]


def static_sweep(
    calibration: Calibration, costs: PassCosts, budgets: Sequence[int], width: int, sequences: int = 1
) -> list[SpeedForecast]:
    """Return the speed forecast of static trees, with the best shape for each budget.

    Args:
        calibration: Acceptance of this target and draft.
        costs: Costs of passes and steps.
        budgets: Maximum nodes verified in a pass.
        width: Maximum nodes of a tree expanded by a draft step.
        sequences: Number of sequences that share passes, each with its part of a budget. Default 1.
    """
    acceptance = calibration.acceptance()
    return [
        _static(
            choose_tree_shape(acceptance, costs, budget // sequences, width), costs, budget, width, sequences
        )
        for budget in budgets
    ]


def _static(shape: TreeShape, costs: PassCosts, budget: int, width: int, sequences: int) -> SpeedForecast:
    costs, nodes, tokens = costs.for_sequences(sequences), sequences * len(shape), sequences * shape.expected
    steps = [sequences * len(nodes) for nodes in shape.steps(width)]
    draft = costs.draft_seconds(steps)
    seconds = float(costs.iteration(draft, nodes))
    choice = Choice(budget, width, tokens / seconds, tokens, seconds)
    return SpeedForecast(choice, nodes, shape.depth, draft)


def best(forecasts: Sequence[SpeedForecast]) -> SpeedForecast:
    """Return the fastest choice; among equals the smallest budget, then the smallest width."""
    most = max(found.choice.tok_per_s for found in forecasts)
    good = [found for found in forecasts if found.choice.tok_per_s >= _AS_GOOD * most]
    return min(good, key=lambda found: (found.choice.budget, found.choice.width))

"""Trees of several sequences in one pass: which nodes the next draft step expands, and which are verified.

The link is paid once a pass, whoever uses it, so a node is worth the probability of its path wherever it
grows, and all of them share the rows. See `tree_growth` for a tree that has a pass to itself.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offspec_planners.cost import PassCosts
from offspec_planners.tree_growth import Costs, best_size, pays


def best_width(
    scores: NDArray[np.floating],
    frontier: NDArray[np.floating],
    draft: float,
    costs: PassCosts | None,
    min_gain: float,
) -> int:
    """How many of the nodes that a step could expand it is to expand; 0 where no step pays. See `pays`.

    Args:
        scores: [N], logs of the path probabilities of all trees that share a pass.
        frontier: [W], those of the nodes that could be expanded, in the order in which they would be taken.
        draft: As in `pays`.
        costs: As in `pays`. None: all nodes, or none.
        min_gain: As in `pays`.
    """
    if costs is None:
        return len(frontier) if pays(scores, frontier, draft, None, min_gain) else 0
    best_first = -np.sort(-scores)
    rows = best_size(best_first, draft, costs)
    tokens = float(np.exp(best_first[:rows], dtype=np.float64).sum())
    worth = np.exp(frontier, dtype=np.float64).cumsum()
    then = costs.iteration(draft + costs.step_seconds(np.arange(1, len(frontier) + 1)), rows)
    rates = (tokens + worth) / then
    best = int(np.argmax(rates))
    return best + 1 if rates[best] > tokens / float(costs.iteration(draft, rows)) else 0


def share(
    scores: Sequence[NDArray[np.floating]],
    draft: float,
    costs: Costs | None,
    most: int | None = None,
    floor: int = 1,
) -> list[int]:
    """How many nodes of each tree are verified in a pass that all share: the likeliest, wherever they grow.

    Of equals those of earlier trees come first, and of numbers that give as many tokens per second the
    smallest is taken.

    Args:
        scores: Of each tree, logs of the path probabilities, descending, the root's first.
        draft: Seconds spent drafting.
        costs: Of passes and steps; None: as many nodes as there may be.
        most: Nodes in all; no limit by default. Every tree keeps its root.
        floor: Nodes that each tree keeps where it has as many, and `most` has room for as many of all.
    """
    most = sum(map(len, scores)) if most is None else most
    floor = max(min(floor, most // max(len(scores), 1)), 1)
    kept = [min(floor, len(tree)) for tree in scores]
    others = np.concatenate([tree[first:] for tree, first in zip(scores, kept, strict=True)])
    rest = [len(tree) - first for tree, first in zip(scores, kept, strict=True)]
    tree_of = np.repeat(np.arange(len(scores)), rest)
    order = np.argsort(-others, kind="stable")[: max(most - sum(kept), 0)]
    if costs is not None:
        sure = sum(float(np.exp(tree[:first]).sum()) for tree, first in zip(scores, kept, strict=True))
        expected = sure + np.concatenate([[0.0], np.exp(others[order], dtype=np.float64).cumsum()])
        rows = sum(kept) + np.arange(len(expected))
        order = order[: int(np.argmax(expected / costs.iteration(draft, rows)))]
    more = np.bincount(tree_of[order], minlength=len(scores))
    return (np.array(kept) + more).tolist()  # type: ignore[no-any-return]

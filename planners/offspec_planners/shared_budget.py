"""Trees of several sequences in one pass: nodes to expand in the next draft step, and nodes to verify.

The link is paid once per pass, whichever sequences use it. So the value of a node is the probability of its
path in any tree, and all trees compete for the rows. See `tree_growth` for a tree with a pass of its own.
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
    """Return the number of frontier nodes that a draft step should expand; 0 if no step pays. See `pays`.

    Args:
        scores: [N], log-probabilities of all paths in the trees of a pass.
        frontier: [W], log-probabilities of the nodes that could be expanded, in expansion order.
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
    """Return the number of nodes to verify in each tree of a shared pass: the most likely nodes of all trees.

    Among equal nodes those of earlier trees come first; among numbers of nodes with equal tokens per second,
    the smallest is used.

    Args:
        scores: For each tree, log-probabilities of its paths, descending, the root's first.
        draft: Seconds spent drafting.
        costs: Costs of passes and steps; None: as many nodes as allowed.
        most: Maximum total number of nodes; no limit by default. Every tree keeps its root.
        floor: Minimum number of nodes per tree, if available and if `most` allows it for all trees.
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

"""Filling a static tree: its shape was chosen beforehand, and a draft only says which tokens stand in it.

Each level of the shape is drafted when the one above it is known, its nodes in steps of at most `width`
(Chen et al. 2024, Sequoia, arXiv 2402.12374). The b-th place below a node goes to the draft's b-th guess,
in the order of likelihood or in that of draws: which places there are never depends on what was drawn.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.result import GrownTree
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import Asked, Mixture
from offspec.sampling.token_tree import ROOT
from offspec_planners.sequoia import TreeShape


def grow_static(
    mixture: Mixture,
    ids: Sequence[int],
    shape: TreeShape,
    max_depth: int,
    width: int,
    timeline: Timeline = OFF,
    between: Callable[[], None] | None = None,
) -> GrownTree:
    """Fill a tree of a given shape below the last of the committed ids.

    The main drafter alone fills it. Where it offers fewer children than the shape has places, what would
    hang below is left out.

    Args:
        mixture: The draft sources.
        ids: Committed ids, the last of which is the root.
        shape: Of the tree.
        max_depth: Most levels below the root.
        width: Most nodes that a draft step expands.
        timeline: Records the draft's steps.
        between: Called before every step; what it raises cancels the growth.
    """
    main = mixture.main
    assert main is not None, "a shape is filled by a drafter"
    candidates, asked = GrowingTree(ids[-1]), Asked((0,), {}, {0: {}})
    filled = {ROOT: ROOT}  # node of the shape to candidate
    steps, began = 0, time.perf_counter()
    main.drafter.start(ids)
    for wanted in shape.steps(width):
        inner = [node for node in wanted.tolist() if node in filled]
        nodes = [filled[node] for node in inner]
        if not nodes or candidates.depth[nodes[0]] >= max_depth:  # a step is within one level
            continue
        if between is not None:
            between()
        with timeline.span("draft", "step", width=len(nodes)):
            children = main.drafter.expand(candidates, nodes, main.scorer)
        candidates.asked[0, nodes] = True
        for row, node in enumerate(inner):
            places, first = shape.children(node), candidates.count
            offered = slice(len(places))
            guesses = children.token[row : row + 1, offered], children.log_prob[row : row + 1, offered]
            candidates.extend(np.array([filled[node]]), *guesses)
            fresh = range(first, candidates.count)
            filled |= {
                place: found
                for place, found in zip(places, fresh, strict=False)
                if candidates.token[found] not in mixture.ends  # nothing follows the end of an answer
            }
            if children.token.shape[1]:  # who said nothing has nothing to learn from
                asked.seen[0][filled[node]] = (children, row)
        steps += 1
    asked.spent(0, time.perf_counter() - began)
    every = np.arange(candidates.count)
    return GrownTree(candidates.tree(every), every, steps, candidates, asked)

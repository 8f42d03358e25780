"""Filling a static tree: the shape is precomputed, and the draft only chooses the tokens in it.

Each level of the shape is drafted once the level above is known, in steps of at most `width` nodes (Chen et
al. 2024, Sequoia, arXiv 2402.12374). The b-th place below a node takes the draft's b-th child, in order of
likelihood or of draws; the set of places never depends on the draws.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from offspec.core.trace import OFF, Timeline
from offspec.draft.grow.result import GrownTree
from offspec.draft.growing_tree import GrowingTree
from offspec.draft.mix.mixture import GrowthStats, Mixture
from offspec.sampling.token_tree import ROOT
from offspec_planners.sequoia import TreeShape


def grow_static(
    mixture: Mixture,
    ids: Sequence[int],
    shape: TreeShape,
    max_depth: int,
    width: int,
    timeline: Timeline = OFF,
    check_cancelled: Callable[[], None] | None = None,
) -> GrownTree:
    """Fill a tree of a given shape below the last of the committed ids.

    Only the main drafter fills it. If it offers fewer children than the shape has places, the places and
    their descendants are left out.

    Args:
        mixture: The draft sources.
        ids: Committed ids, the last of which is the root.
        shape: Shape of the tree.
        max_depth: Maximum levels below the root.
        width: Maximum nodes that a draft step expands.
        timeline: Records the draft's steps.
        check_cancelled: Called before every step; an exception it raises cancels the growth.
    """
    main = mixture.main
    assert main is not None, "a shape is filled by a drafter"
    candidates, asked = GrowingTree(ids[-1]), GrowthStats((0,), {}, {0: {}})
    filled = {ROOT: ROOT}  # candidate by node of the shape
    steps, began = 0, time.perf_counter()
    main.drafter.start(ids)
    for wanted in shape.steps(width):
        inner = [node for node in wanted.tolist() if node in filled]
        nodes = [filled[node] for node in inner]
        if not nodes or candidates.depth[nodes[0]] >= max_depth:  # a step stays within one level
            continue
        if check_cancelled is not None:
            check_cancelled()
        with timeline.span("draft", "step", width=len(nodes)):
            children = main.drafter.expand(candidates, nodes, main.scorer)
        candidates.expanded_by[0, nodes] = True
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
            if children.token.shape[1]:  # without predictions there is nothing to learn
                asked.predictions[0][filled[node]] = (children, row)
        steps += 1
    asked.spent(0, time.perf_counter() - began)
    every = np.arange(candidates.count)
    return GrownTree(candidates.tree(every), every, steps, candidates, asked)

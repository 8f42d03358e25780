"""Filling a static tree: its shape was chosen beforehand, and a draft only says which tokens stand in it.

Each level of the shape is drafted when the one above it is known, its nodes in steps of at most `width`
(Chen et al. 2024, Sequoia, arXiv 2402.12374). The b-th place below a node goes to the draft's b-th guess.
"""

from collections.abc import Callable, Sequence

import numpy as np

from offspec.draft.base import Children, Drafter, Scorer
from offspec.grow import Growth
from offspec.timeline import OFF, Timeline
from offspec.tree import ROOT, Candidates
from offspec_planners.sequoia import Shape


def grow_static(
    drafter: Drafter,
    scorer: Scorer,
    ids: Sequence[int],
    shape: Shape,
    max_depth: int,
    width: int,
    timeline: Timeline = OFF,
    between: Callable[[], None] | None = None,
) -> Growth:
    """A tree of this shape below the last of the committed ids, no deeper than `max_depth` tokens.

    Where the draft offers fewer children than the shape has places, what would hang below is left out.
    between: called before every step; what it raises breaks the growth off.
    """
    candidates = Candidates(ids[-1])
    filled = {ROOT: ROOT}  # node of the shape to candidate
    seen: dict[int, tuple[Children, int]] = {}
    steps = 0
    drafter.start(ids)
    for wanted in shape.steps(width):
        inner = [node for node in wanted.tolist() if node in filled]
        nodes = [filled[node] for node in inner]
        if not nodes or candidates.depth[nodes[0]] >= max_depth:  # a step is within one level
            continue
        if between is not None:
            between()
        with timeline.span("draft", "step", width=len(nodes)):
            children = drafter.expand(candidates, nodes, scorer)
        candidates.expanded[nodes] = True
        for row, node in enumerate(inner):
            places, first = shape.children(node), candidates.count
            offered = slice(len(places))
            candidates.add(filled[node], children.token[row, offered], children.log_prob[row, offered])
            filled.update(zip(places, range(first, candidates.count), strict=False))
            seen[filled[node]] = (children, row)
        steps += 1
    every = np.arange(candidates.count)
    return Growth(candidates.tree(every), every, steps, seen)

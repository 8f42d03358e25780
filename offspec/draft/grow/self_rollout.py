"""Self-rollout: trees along a text that the draft generates alone, to estimate acceptance without the target.

A good draft continues a text almost as the target would. So trees grown along the draft's own answer resemble
those for the target's answer: deep in easy passages, bushy in hard ones. That costs no pass of the target,
and predicts the tokens per pass for this particular prompt.
"""

from collections.abc import Sequence

import torch

from offspec.draft.grow.best_first import grow
from offspec.draft.grow.result import GrownTree
from offspec.draft.grow.tree_grower import GrowthPolicy
from offspec.draft.mix.mixture import Mixture
from offspec.sampling.token_tree import ROOT
from offspec_planners.tree_growth import RecordedTree

_DEEPEST = 400  # levels: repetitive answers are drafted as deep as the nodes allow


@torch.no_grad()
def self_rollout(
    mixture: Mixture,
    ids: Sequence[int],
    policy: GrowthPolicy,
    stride: int,
    trees: int,
    room: int,
) -> list[RecordedTree]:
    """Grow trees along an answer that the draft generates alone, without a pass of the target.

    The first tree, at the beginning of the answer, is left out. Leaves the draft's cache empty.

    Args:
        mixture: The draft sources.
        ids: The prompt.
        policy: Trees have `policy.record_nodes` nodes.
        stride: Approximate tokens between the roots of two trees.
        trees: Number of trees; fewer if `room` is too small.
        room: Maximum tokens of the text plus the deepest path of its tree.
    """
    assert mixture.main is not None, "a preview is a drafter's"
    drafter, text, found = mixture.main.drafter, list(ids), list[RecordedTree]()
    drafter.rewind(
        0
    )  # the cache may still hold another text, which must not be taken for the beginning of this one
    try:
        while len(found) <= trees:
            growth = grow(mixture, text, policy, min(_DEEPEST, room - len(text)))
            if growth.recorded is None:
                break
            found.append(growth.recorded)
            nodes, tokens = _top_choice_path(growth, stride)
            drafter.commit(nodes)
            text += tokens
    finally:
        drafter.rewind(0)
    return found[1:]


def _top_choice_path(growth: GrownTree, count: int) -> tuple[list[int], list[int]]:
    """Return the expanded candidates along the draft's top choices, and those choices: `count` at most."""
    tree, node = growth.tree, ROOT
    nodes, tokens = list[int](), list[int]()
    while len(tokens) < count and int(growth.candidates[node]) in growth.children:
        children, row = growth.children[int(growth.candidates[node])]
        token = int(children.token[row][0])
        nodes.append(int(growth.candidates[node]))
        tokens.append(token)
        below = tree.children(node).get(token)
        if below is None:
            break
        node = below
    return nodes, tokens

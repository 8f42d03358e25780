"""What a draft expects of an answer, by itself: trees along a text that it continues in its own words.

A draft that guesses well says nearly what the target would, so the trees that it grows along its own answer
are like those that the target's answer will meet: as deep where the text is easy, as bushy where it is not.
That costs no pass, and tells how many tokens a pass will bring for this very prompt.
"""

from collections.abc import Sequence

import torch

from offspec.draft.grow.best_first import grow
from offspec.draft.grow.growing import GrowthPolicy
from offspec.draft.grow.result import GrownTree
from offspec.draft.mix.mixture import Mixture
from offspec.sampling.token_tree import ROOT
from offspec_planners.tree_growth import Grown

_DEEPEST = 400  # levels: an answer that repeats itself is guessed as far as there are nodes


@torch.no_grad()
def self_rollout(
    mixture: Mixture,
    ids: Sequence[int],
    policy: GrowthPolicy,
    stride: int,
    trees: int,
    room: int,
) -> list[Grown]:
    """Trees that the draft grows along an answer of its own, without a pass of the target.

    The first tree, at the answer's beginning, is left out. Leaves the draft's cache empty.

    Args:
        mixture: The draft sources.
        ids: The prompt.
        policy: Trees have `policy.record` nodes.
        stride: About how many tokens lie between the roots of two trees.
        trees: How many trees; fewer where `room` is too little.
        room: Most tokens of the text with the deepest path of its tree.
    """
    assert mixture.main is not None, "a preview is a drafter's"
    drafter, text, found = mixture.main.drafter, list(ids), list[Grown]()
    drafter.rewind(0)  # it may still hold another text, and takes what it holds for the start of this one
    try:
        while len(found) <= trees:
            growth = grow(mixture, text, policy, min(_DEEPEST, room - len(text)))
            if growth.recorded is None:
                break
            found.append(growth.recorded)
            nodes, tokens = _favourites(growth, stride)
            drafter.commit(nodes)
            text += tokens
    finally:
        drafter.rewind(0)
    return found[1:]


def _favourites(growth: GrownTree, count: int) -> tuple[list[int], list[int]]:
    """The expanded candidates along the draft's first choices, and those choices: at most `count`."""
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

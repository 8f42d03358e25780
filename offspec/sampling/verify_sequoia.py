"""Sequoia's verification: guesses that were drawn without replacement, tested one after the other.

At a node with the target's distribution R and the draft's D, from which its children were drawn in order,
child x is accepted where r D[x] < R[x], with a fresh uniform number r. If it is not, R becomes the excess
max(R - D, 0) and D loses x, both divided by their sums; where no child is accepted, the token is drawn from R
(Chen et al. 2024, Sequoia, arXiv 2402.12374). What is emitted is distributed as the target's own samples, but
it depends on the draft: two drafts say two things with one seed.

This holds only where what a tree looks like does not depend on what was drawn: places are laid out before a
token is known, as `offspec.draft.grow.static` does.

Letters: V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from offspec.sampling.logits_processor import LogitsProcessor
from offspec.sampling.token_tree import ROOT, TokenTree
from offspec.sampling.verify import LikelyRows, Walk

# float64, or fractions where the rule is to be checked exactly.
Distribution = NDArray[Any]

_NONE = 1e-290  # float64 loses digits a little below: what is less likely is taken for impossible


def walk_without_replacement(
    tree: TokenTree,
    rows: LikelyRows,
    processor: LogitsProcessor,
    drafts: Callable[[int], torch.Tensor],
    numbers: Callable[[int], Iterator[float]],
    position: int,
    stop: Callable[[int], bool],
) -> Walk:
    """Follow the target down a tree whose siblings stand in the order in which they were drawn.

    The target's filters shape R; D may be unfiltered. The walk's gaps are NaN: this rule has none. See Chen
    et al. 2024, Sequoia, arXiv 2402.12374.

    Args:
        tree: As in `verify.walk`.
        rows: As in `verify.walk`.
        processor: As in `verify.walk`.
        drafts: Gives the scores [V] float32 whose softmax a node's children were drawn from; called where
            there are children only.
        numbers: numbers(position) gives uniform random numbers in (0, 1) for the choice of the token there,
            independent of all others and of the draws.
        position: As in `verify.walk`.
        stop: As in `verify.walk`.
    """
    node, path, nodes = ROOT, list[int](), [ROOT]
    while True:
        chances = numbers(position + len(path) + 1)
        target = processor.distribution(rows[node], path).numpy()
        children = tree.children(node)
        token = None
        if children:
            token, target = judge(target, _distribution(drafts(node)), list(children), chances)
        if token is None:
            token = _drawn(target, next(chances))
        path.append(token)
        child = children.get(token)
        stopped = stop(token)
        if stopped or child is None:
            known = processor.logprobs([rows[node] for node in nodes], path)
            return Walk(tuple(nodes), tuple(path), (math.nan,) * len(path), stopped, known)
        node = child
        nodes.append(node)


def judge(
    target: Distribution, draft: Distribution, children: Sequence[int], chances: Iterator[float]
) -> tuple[int | None, Distribution]:
    """Test the children of a node in drawn order.

    Works in whatever numbers it is given. Returns the accepted child, if any, and what is left of the target,
    from which the token is to be drawn where there is none.

    Args:
        target: [V], R, with a sum of one; not changed.
        draft: [V], D, with a sum of one; not changed.
        children: Tokens, in the order in which they were drawn.
        chances: Uniform random numbers in (0, 1).
    """
    for child in children:
        if not draft[child]:
            break  # drawn after all that the draft took for possible, so there are no odds to test it by
        if next(chances) * draft[child] < target[child]:
            return child, target
        excess = np.maximum(target - draft, 0)
        # A rejected child has D[x] > R[x], so there is an excess elsewhere. Where rounding ate it the two
        # distributions are as good as equal, and the target's stays as it was.
        if excess.any():
            target = excess / excess.sum()
        draft = draft.copy()
        draft[child] = 0
        if not draft.any():
            break
        draft /= draft.sum()
    return None, target


def _distribution(scores: torch.Tensor) -> Distribution:
    """softmax(scores) in float64, [V]."""
    likely = torch.softmax(scores.double(), dim=0)
    return likely.masked_fill_(likely < _NONE, 0.0).cpu().numpy()


def _drawn(target: Distribution, chance: float) -> int:
    """The token at which the sum of the likelihoods [V] passes the share `chance` of all."""
    sums = np.cumsum(target)
    return int(np.searchsorted(sums, chance * sums[-1], side="right"))

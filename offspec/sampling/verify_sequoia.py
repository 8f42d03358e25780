"""Sequoia's verification: draft tokens that were drawn without replacement are tested in order.

At a node with the target's distribution R and the draft's distribution D, from which the children were drawn
in order, child x is accepted if r D[x] < R[x], with a new uniform number r. If x is rejected, R becomes the
excess max(R - D, 0) and x is removed from D; both are normalized. If no child is accepted, the token is drawn
from R (Chen et al. 2024, Sequoia, arXiv 2402.12374). The emitted tokens have the distribution of the target's
own samples, but they depend on the draft: with one seed, two drafts lead to two texts.

This is only correct if the shape of the tree does not depend on the drawn tokens. `offspec.draft.grow.static`
lays out all nodes before any token is known.

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
from offspec.sampling.verify import LazyLogits, VerifyResult

# float64, or fractions in tests that check the rule exactly.
Distribution = NDArray[Any]

_NONE = 1e-290  # smaller probabilities count as 0: float64 loses digits a little below


def verify_without_replacement(
    tree: TokenTree,
    rows: LazyLogits,
    processor: LogitsProcessor,
    drafts: Callable[[int], torch.Tensor],
    acceptance_uniforms: Callable[[int], Iterator[float]],
    position: int,
    stop: Callable[[int], bool],
) -> VerifyResult:
    """Follow the target down a tree whose siblings are in the order in which they were drawn.

    The target's filters apply to R; D may be unfiltered. The logit gaps of the result are NaN, since this
    rule has none. See Chen et al. 2024, Sequoia, arXiv 2402.12374.

    Args:
        tree: As in `verify_tree`.
        rows: As in `verify_tree`.
        processor: As in `verify_tree`.
        drafts: Returns the scores [V] float32 whose softmax a node's children were drawn from; only called
            for nodes with children.
        acceptance_uniforms: Returns uniform random numbers in (0, 1) for the choice at a position,
            independent of all others and of the draws.
        position: As in `verify_tree`.
        stop: As in `verify_tree`.
    """
    node, path, nodes = ROOT, list[int](), [ROOT]
    while True:
        chances = acceptance_uniforms(position + len(path) + 1)
        target = processor.distribution(rows[node], path).numpy()
        children = tree.children(node)
        token = None
        if children:
            token, target = accept_child(target, _distribution(drafts(node)), list(children), chances)
        if token is None:
            token = _drawn(target, next(chances))
        path.append(token)
        child = children.get(token)
        stopped = stop(token)
        if stopped or child is None:
            known = processor.logprobs([rows[node] for node in nodes], path)
            return VerifyResult(tuple(nodes), tuple(path), (math.nan,) * len(path), stopped, known)
        node = child
        nodes.append(node)


def accept_child(
    target: Distribution, draft: Distribution, children: Sequence[int], uniforms: Iterator[float]
) -> tuple[int | None, Distribution]:
    """Test the children of a node in the order in which they were drawn.

    Works with any number type. Returns the accepted child or None, and the remaining target distribution,
    from which the token must be drawn if no child was accepted.

    Args:
        target: [V], R, with a sum of one; not modified.
        draft: [V], D, with a sum of one; not modified.
        children: Tokens, in the order in which they were drawn.
        uniforms: Uniform random numbers in (0, 1).
    """
    for child in children:
        if not draft[child]:
            break  # drawn after all possible tokens of the draft, so it has no probability to test with
        if next(uniforms) * draft[child] < target[child]:
            return child, target
        excess = np.maximum(target - draft, 0)
        # A rejected child has D[x] > R[x], so there is an excess elsewhere. If rounding removed it, the two
        # distributions are practically equal, and the target's stays unchanged.
        if excess.any():
            target = excess / excess.sum()
        draft = draft.copy()
        draft[child] = 0
        if not draft.any():
            break
        draft /= draft.sum()
    return None, target


def _distribution(scores: torch.Tensor) -> Distribution:
    """Return softmax(scores) in float64, [V]."""
    likely = torch.softmax(scores.double(), dim=0)
    return likely.masked_fill_(likely < _NONE, 0.0).cpu().numpy()


def _drawn(target: Distribution, chance: float) -> int:
    """Return the token at which the cumulative probability [V] exceeds `chance` times the total."""
    sums = np.cumsum(target)
    return int(np.searchsorted(sums, chance * sums[-1], side="right"))

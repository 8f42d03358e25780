"""Trees drawn from a random text model: the basis of a plan before a draft has been measured.

Text is easy in most places and hard in some. Here the probability of a context's likeliest token is
logit-normal, drawn anew at every node; other tokens share the remainder by a power of their rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offspec_planners.tree_growth import RecordedTree

TREES = 16
NODES = 2048
_DEEPEST = 64
_TOGETHER = 256  # nodes expanded at a time, until every node of a tree is expanded
_SHARES = np.arange(1, 32) ** -1.5
_SHARES *= 0.97 / _SHARES.sum()  # the rest goes to tokens after the 32nd


@dataclass(frozen=True, slots=True)
class TypicalDraft:
    """Typical acceptance of a kind of draft before one has been measured.

    Args:
        mean, spread: Parameters of `draw_forest`.
        power: Exponent of each draft token's probability. Default 1: as drawn.
        by_bits: Further exponents, by the bits of the draft's weights; 1 without an entry.
        share: Draft weights over target weights for which this holds. Default None: any share.
    """

    mean: float
    spread: float
    power: float = 1.0
    by_bits: Mapping[int, float] = field(default_factory=dict)
    share: float | None = None


# Effect of a self-draft's bits. With SmolLM2-135M 3 bits yield 0.57 of the tokens of 4, and 2 bits a quarter,
# in trees of 128 nodes; larger models are less sensitive.
SELF_DRAFT = TypicalDraft(2.85, 2.5, by_bits={4: 1.0, 3: 1.6, 2: 4.0})
# A small model. Published: 11.7 tokens per pass for a 70B with an 8B (Sequoia, Llama-3, 768 nodes), whose
# share is counted without embeddings. The effect of 4 bits is a conservative estimate, not measured.
MODEL = TypicalDraft(2.7, 2.5, by_bits={16: 1.0, 4: 1.02, 3: 1.6, 2: 4.0}, share=7.5 / 69.5)
# A conservative estimate: Medusa's authors report 2 to 3 tokens per pass in trees of 64 nodes.
HEAD = TypicalDraft(0.0, 1.0, power=1.3)


@dataclass(frozen=True, slots=True)
class WalkCounts:
    """Walk counts of nodes by depth [D], and pick counts of the r-th child there [D, K]."""

    visits: NDArray[np.float64]
    hits: NDArray[np.float64]


@cache
def draw_forest(mean: float, spread: float, depths: int) -> tuple[list[RecordedTree], WalkCounts]:
    """Draw 16 trees of 2048 nodes, the same for the same arguments, and return statistics of walks through
    them.

    mean, spread: of the logit of the likeliest token's probability. depths: D; deeper levels count for the
    last.
    """
    random = np.random.default_rng(0)
    walks = WalkCounts(np.zeros(depths), np.zeros((depths, len(_SHARES) + 1)))
    return [_draw_tree(random, mean, spread, walks) for _ in range(TREES)], walks


def _draw_tree(random: np.random.Generator, mean: float, spread: float, walks: WalkCounts) -> RecordedTree:
    parent, score, depth = np.array([-1]), np.zeros(1), np.zeros(1, np.int64)
    expanded = np.zeros(1, np.bool_)
    while True:
        best = np.sort(np.argsort(-score, kind="stable")[:NODES])
        if len(best) == NODES:  # keep only the best, in their order
            place = np.full(len(score), -1)
            place[best] = np.arange(NODES)
            parent, score, depth = place[parent[best]], score[best], depth[best]
            parent[0] = -1
            expanded = expanded[best]
        unexpanded = np.flatnonzero(~expanded & (depth < _DEEPEST))
        if not len(unexpanded):
            return RecordedTree(parent.astype(np.int32), score.astype(np.float32))
        nodes = unexpanded[np.argsort(-score[unexpanded], kind="stable")[:_TOGETHER]]
        probabilities = _contexts(random, len(nodes), mean, spread)
        _count(walks, depth[nodes], np.exp(score[nodes]), probabilities)
        expanded[nodes] = True
        children = probabilities.shape[1]
        parent = np.concatenate([parent, np.repeat(nodes, children)])
        depth = np.concatenate([depth, np.repeat(depth[nodes] + 1, children)])
        score = np.concatenate([score, (score[nodes, None] + np.log(probabilities)).ravel()])
        expanded = np.concatenate([expanded, np.zeros(len(nodes) * children, np.bool_)])


def _contexts(random: np.random.Generator, count: int, mean: float, spread: float) -> NDArray[np.float64]:
    """Return probabilities of the 32 likeliest tokens in `count` contexts [count, 32], descending."""
    top = 1 / (1 + np.exp(-random.normal(mean, spread, (count, 1))))
    return -np.sort(-np.concatenate([top, (1 - top) * _SHARES], axis=1), axis=1)


def _count(
    walks: WalkCounts,
    depth: NDArray[np.int64],
    reached: NDArray[np.float64],
    probabilities: NDArray[np.float64],
) -> None:
    rows = np.minimum(depth, len(walks.visits) - 1)
    np.add.at(walks.visits, rows, reached)
    np.add.at(walks.hits, rows, reached[:, None] * probabilities)


def expected_tokens(forest: Sequence[RecordedTree], nodes: int) -> float:
    """Return the expected tokens of the best `nodes` nodes of a tree, the mean over trees."""
    return float(np.mean([np.exp(-np.sort(-tree.score)[:nodes], dtype=np.float64).sum() for tree in forest]))

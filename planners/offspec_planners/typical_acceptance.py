"""Trees drawn from a random text: what a plan goes by before a draft has been seen at work.

Text is easy in most places and hard in some. Here the probability of a context's likeliest token is
logit-normal, drawn afresh at every node; the others share what is left by a power of their rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
from numpy.typing import NDArray

from offspec_planners.tree_growth import Grown

TREES = 16
NODES = 2048
_DEEPEST = 64
_TOGETHER = 256  # nodes expanded at a time; a tree is grown until every node of it is
_SHARES = np.arange(1, 32) ** -1.5
_SHARES *= 0.97 / _SHARES.sum()  # the rest goes to tokens behind the 32nd


@dataclass(frozen=True, slots=True)
class TypicalDraft:
    """How well drafts of a kind guess before one has been measured.

    Args:
        mean, spread: For `draw_forest`.
        power: Raises the probability of each guess. Default 1: as drawn.
        by_bits: More such powers, by the bits of the draft's weights; without an entry, 1.
        share: The draft's weights over the target's that this holds for. Default None: whatever they are.
    """

    mean: float
    spread: float
    power: float = 1.0
    by_bits: Mapping[int, float] = field(default_factory=dict)
    share: float | None = None


# How a substitute's guesses go with its bits. With SmolLM2-135M 3 bits yield 0.57 of the tokens of 4, and 2
# bits a quarter, in trees of 128 nodes; larger models are less easily hurt.
SUBSTITUTE = TypicalDraft(2.85, 2.5, by_bits={4: 1.0, 3: 1.6, 2: 4.0})
# A small model. Published: 11.7 tokens a pass for a 70B with an 8B (Sequoia, Llama-3, 768 nodes), whose share
# is counted without embeddings. What 4 bits make of it is a careful guess, not measured.
MODEL = TypicalDraft(2.7, 2.5, by_bits={16: 1.0, 4: 1.02, 3: 1.6, 2: 4.0}, share=7.5 / 69.5)
# A careful guess: Medusa's authors report 2 to 3 tokens a pass in trees of 64 nodes.
HEAD = TypicalDraft(0.0, 1.0, power=1.3)


@dataclass(frozen=True, slots=True)
class Walks:
    """How often nodes are walked to, by depth [D], and how often the r-th child is picked there [D, K]."""

    visits: NDArray[np.float64]
    hits: NDArray[np.float64]


@cache
def draw_forest(mean: float, spread: float, depths: int) -> tuple[list[Grown], Walks]:
    """16 trees of 2048 nodes, always the same for the same numbers, and what walks through them meet.

    mean, spread: of the logit of the likeliest token's probability. depths: D; what is deeper counts for
    the last.
    """
    random = np.random.default_rng(0)
    walks = Walks(np.zeros(depths), np.zeros((depths, len(_SHARES) + 1)))
    return [_draw_tree(random, mean, spread, walks) for _ in range(TREES)], walks


def _draw_tree(random: np.random.Generator, mean: float, spread: float, walks: Walks) -> Grown:
    parent, score, depth = np.array([-1]), np.zeros(1), np.zeros(1, np.int64)
    expanded = np.zeros(1, np.bool_)
    while True:
        best = np.sort(np.argsort(-score, kind="stable")[:NODES])
        if len(best) == NODES:  # only the best are kept, in their order
            place = np.full(len(score), -1)
            place[best] = np.arange(NODES)
            parent, score, depth = place[parent[best]], score[best], depth[best]
            parent[0] = -1
            expanded = expanded[best]
        unexpanded = np.flatnonzero(~expanded & (depth < _DEEPEST))
        if not len(unexpanded):
            return Grown(parent.astype(np.int32), score.astype(np.float32))
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
    """Probabilities of the 32 likeliest tokens in `count` contexts [count, 32], descending."""
    top = 1 / (1 + np.exp(-random.normal(mean, spread, (count, 1))))
    return -np.sort(-np.concatenate([top, (1 - top) * _SHARES], axis=1), axis=1)


def _count(
    walks: Walks,
    depth: NDArray[np.int64],
    reached: NDArray[np.float64],
    probabilities: NDArray[np.float64],
) -> None:
    rows = np.minimum(depth, len(walks.visits) - 1)
    np.add.at(walks.visits, rows, reached)
    np.add.at(walks.hits, rows, reached[:, None] * probabilities)


def expected_tokens(forest: Sequence[Grown], nodes: int) -> float:
    """Expected tokens of the best `nodes` nodes of a tree, the mean over trees."""
    return float(np.mean([np.exp(-np.sort(-tree.score)[:nodes], dtype=np.float64).sum() for tree in forest]))

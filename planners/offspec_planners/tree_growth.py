"""Arithmetic of best-first tree growth: when another draft step pays, which nodes to keep, and replays.

A tree of N nodes is worth G = the sum of its path probabilities, in expected tokens, and costs t seconds of
drafting and verifying; the goal is to maximize G / t. The growth itself is part of the engine, which runs the
draft. Here it is replayed on recorded trees, to predict the effect of another budget or width.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from offspec_planners.cost import PassCosts
from offspec_planners.json_fields import complain, read


@dataclass(frozen=True, slots=True)
class Tabulated:
    """Costs in tables, for replays under many settings: seconds by rows and by width; see `PassCosts`.

    passes, links, unhidden: [rows + 1]; steps: [width + 1].
    """

    start: float
    link: float
    links: NDArray[np.float64]
    passes: NDArray[np.float64]
    steps: NDArray[np.float64]
    exposed_share: NDArray[np.float64]

    def step_seconds(self, width: int) -> np.float64:
        """Return `PassCosts.step_seconds` for an integer width."""
        return np.float64(self.steps[width])

    def iteration(
        self, draft: float | NDArray[np.float64], rows: int | NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return `PassCosts.iteration` for integer rows."""
        left = draft * self.exposed_share[rows]
        return np.asarray(np.maximum(left + self.passes[rows], self.links[rows]))


@lru_cache(maxsize=256)
def cost_table(costs: PassCosts, rows: int, width: int) -> Tabulated:
    """Tabulate the costs of passes of up to `rows` rows, and of steps of up to `width` nodes."""
    every, steps = np.arange(rows + 1), costs.step_seconds(np.arange(width + 1))
    links, passes = costs.link_seconds(every), costs.pass_seconds(every)
    return Tabulated(costs.start, costs.link, links, passes, steps, costs.exposed_share(every))


Costs = PassCosts | Tabulated

_MIN_GAIN = 0.01  # share of a tree's tokens

_PARENT = "a list of earlier nodes, beginning with -1"
_SCORE = "a list of numbers, one for each node, beginning with 0, none above its parent's"


@dataclass(frozen=True, slots=True)
class _Saved:
    """Saved form of a recorded tree."""

    parent: Annotated[tuple[Annotated[int, Meta(ge=-1, lt=2**31)], ...], Meta(description=_PARENT)]
    score: Annotated[tuple[float, ...], Meta(description=_SCORE)]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTree:
    """Recorded tree in topological order, root first: everything needed to replay its growth.

    Args:
        parent: [N] int32, -1 for the root.
        score: [N] float32, log-probability of the path, never above the parent's.
    """

    parent: NDArray[np.int32]
    score: NDArray[np.float32]

    def depth(self) -> NDArray[np.int32]:
        """Return depths [N], 0 for the root."""
        depth = np.zeros(len(self.parent), np.int32)
        for node, parent in enumerate(self.parent[1:].tolist(), 1):
            depth[node] = depth[parent] + 1
        return depth

    def to_json(self) -> dict[str, Any]:
        score = np.round(self.score.astype(np.float64), 4)
        return {"parent": self.parent.tolist(), "score": score.tolist()}

    @classmethod
    def from_json(cls, found: object, path: str = "") -> "RecordedTree":
        """Load a tree. Raises ValueError in one line: the key, its value, the expected value."""
        saved = read(found, _Saved, path)
        parent, score = np.array(saved.parent, np.int32), np.array(saved.score, np.float32)
        if not len(parent) or parent[0] != -1 or (parent[1:] < 0).any():
            complain(f"{path}parent", saved.parent, _PARENT)
        if (parent[1:] >= np.arange(1, len(parent))).any():
            complain(f"{path}parent", saved.parent, _PARENT)
        descends = score.shape == parent.shape and score[0] == 0 and (score[1:] <= score[parent[1:]]).all()
        if not (descends and np.isfinite(score).all()):
            complain(f"{path}score", saved.score, _SCORE)
        return cls(parent, score)


@dataclass(frozen=True, slots=True)
class GrowthOutcome:
    """Growth of a tree: nodes expanded by each draft step; then its nodes, expected tokens and levels."""

    widths: tuple[int, ...]
    nodes: int
    expected: float
    depth: int


def best_size(scores: NDArray[np.floating], draft: float, costs: Costs) -> int:
    """Return the number of best nodes with the most tokens per second; among equals the smallest.

    Args:
        scores: [N], log-probabilities of the paths, descending, the root's first.
        draft: Seconds spent drafting.
        costs: Costs of passes and steps.
    """
    return _best_rows(np.cumsum(np.exp(scores, dtype=np.float64)), draft, costs)


def _best_rows(expected: NDArray[np.float64], draft: float, costs: Costs, least: int = 1) -> int:
    """Return the best number of nodes, given the expected tokens of the first node, the first two, and so on.

    least: minimum number of nodes.
    """
    rows = np.arange(least, len(expected) + 1)
    return int(np.argmax(expected[least - 1 :] / costs.iteration(draft, rows))) + least


def pays(
    scores: NDArray[np.floating],
    frontier: NDArray[np.floating],
    draft: float,
    costs: PassCosts | None,
    min_gain: float,
) -> bool:
    """Return whether to take a draft step.

    Args:
        scores: [N], log-probabilities of the tree's paths.
        frontier: [W], log-probabilities of the nodes that the step expands.
        draft: Seconds spent drafting so far.
        costs: Costs of passes and steps: the step must be able to raise tokens per second. None: it must be
            able to add `min_gain` of the tokens.
        min_gain: Share of the tree's expected tokens.
    """
    probability = np.exp(-np.sort(-scores), dtype=np.float64)
    worth = float(np.exp(frontier, dtype=np.float64).sum())
    return _pays(probability, worth, len(frontier), draft, costs, min_gain)


def _pays(
    probability: NDArray[np.float64],
    worth: float,
    width: int,
    draft: float,
    costs: Costs | None,
    min_gain: float,
    least: int = 1,
) -> bool:
    """Return whether a step pays, given descending probabilities of the tree's paths and the frontier's sum.

    least: minimum number of nodes.
    """
    if costs is None:
        return worth >= min_gain * float(probability.sum())
    if costs.iteration(draft + costs.step_seconds(width), len(probability)) <= costs.link:
        return worth > 0  # the link takes longer than drafting and verifying in any case
    expected = probability.cumsum()
    rows = _best_rows(expected, draft, costs, least)
    tokens, now = float(expected[rows - 1]), float(costs.iteration(draft, rows))
    then = float(costs.iteration(draft + float(costs.step_seconds(width)), rows))
    return (tokens + worth) * now > tokens * then


def worth_expanding(
    probability: NDArray[np.float64], tree: NDArray[np.float64], budget: int, min_gain: float
) -> NDArray[np.bool_]:
    """Return which nodes are worth a place in a draft step, [W] bool.

    A node is not if a whole tree of `budget` nodes below it would not add `min_gain` of the tree's tokens.
    If the draft is confident, nearly all nodes are such, and expanding them would use up `max_expanded` long
    before the one path that matters is deep.

    Args:
        probability: [W], path probabilities of the nodes.
        tree: [N], path probabilities of the tree.
        budget: Maximum nodes of the tree.
        min_gain: Share of the tree's expected tokens.
    """
    return probability * budget >= min_gain * float(tree.sum())


def max_expanded(budget: int, width: int) -> int:
    """Return the maximum nodes expanded for a tree, which bounds the draft's work and its cache's rows."""
    return 2 * budget + width


def replay(
    trees: tuple[RecordedTree, ...],
    budget: int,
    width: int,
    costs: PassCosts | None,
    min_gain: float = _MIN_GAIN,
    max_depth: int | None = None,
) -> GrowthOutcome:
    """Replay the growth of recorded trees with another budget and width.

    Several trees belong to sequences that share passes and draft steps: every tree keeps its root, and the
    likeliest nodes of all trees are kept. A record must have more than `budget` nodes. Nodes that only the
    first steps of a growth would have tried are not in it.

    Args:
        trees: Recorded trees.
        budget: Maximum total nodes of all trees.
        width: Maximum nodes of each tree expanded by a draft step.
        costs: Costs of passes and steps, which end the growth as in `pays`; None: `min_gain` ends it.
        min_gain: Share of the expected tokens, 0.01 by default.
        max_depth: Deepest level allowed; no limit by default.
    """
    record, count = _ordered(trees), len(trees)
    step = count * width
    looked_up = cost_table(costs, budget, step) if costs else None
    closed = np.zeros(len(record.depth), np.bool_)  # expanded, or too deep to be
    if max_depth is not None:
        closed = record.depth >= max_depth
    expanded = np.zeros(len(record.depth), np.bool_)
    best, known = np.arange(count), np.arange(len(record.depth)) < count
    widths, draft = list[int](), costs.start if costs else 0.0
    while sum(widths) + step <= max_expanded(budget, step):
        nodes = best[~closed[best]]
        of_each = [nodes if count == 1 else nodes[record.tree[nodes] == tree] for tree in range(count)]
        nodes = np.concatenate([some[:width] for some in of_each])
        probability = record.probability[best]
        nodes = nodes[worth_expanding(record.probability[nodes], probability, budget, min_gain)]
        worth = float(record.probability[nodes].sum())
        if not len(nodes) or (
            widths and not _pays(probability, worth, len(nodes), draft, looked_up, min_gain, count)
        ):
            break
        expanded[nodes] = closed[nodes] = True
        widths.append(len(nodes))
        draft += float(looked_up.step_seconds(len(nodes))) if looked_up else 0.0
        known |= expanded[record.parent]
        best = known.nonzero()[0][:budget]
    expected = record.probability[best].cumsum()
    size = _best_rows(expected, draft, looked_up, count) if looked_up else len(best)
    deepest = np.zeros(count, np.int32)
    np.maximum.at(deepest, record.tree[best[:size]], record.depth[best[:size]])
    return GrowthOutcome(tuple(widths), size, float(expected[size - 1]), round(float(deepest.mean())))


def best_nodes(tree: RecordedTree, nodes: int) -> float:
    """Return the expected tokens of the best `nodes` nodes of a record, ignoring the cost of finding them."""
    return float(_ordered((tree,)).probability[:nodes].sum())


class _Ordered(NamedTuple):
    """Recorded trees sorted by probability, roots first: [N] each.

    parent: index of the parent in this order; tree: index of a node's tree.
    """

    parent: NDArray[np.int64]
    probability: NDArray[np.float64]
    depth: NDArray[np.int32]
    tree: NDArray[np.int64]


@lru_cache(maxsize=128)
def _ordered(trees: tuple[RecordedTree, ...]) -> _Ordered:
    """Sort the nodes, the older first among equals. Cached, since trees are replayed under many settings."""
    sizes = [len(tree.parent) for tree in trees]
    before = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes)  # nodes of earlier trees
    parent = np.concatenate([tree.parent for tree in trees])
    score = np.concatenate([tree.score for tree in trees])
    order = np.lexsort((-score, parent >= 0))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return _Ordered(
        place[(np.maximum(parent, 0) + before)[order]],
        np.exp(score[order], dtype=np.float64),
        np.concatenate([tree.depth() for tree in trees])[order],
        np.repeat(np.arange(len(trees)), sizes)[order],
    )

"""Subtree of the likeliest continuations of a passage in known texts.

Nodes are opened best-first, by the probability of their paths. Steps cost next to nothing here, but noise is
cheap only for many tokens at once. So several nodes are opened together, each is followed down its likeliest
continuations while these are likely enough, and the noise of all is computed in one call.
"""

import heapq
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from offspec.draft.growing_tree import Subtree
from offspec.sampling.noise import GumbelNoise, gumbel_at, log_prob_given_noise

_TOGETHER = 16  # nodes opened between two computations of noise
_FOLLOWED = 0.1  # minimum probability of a path that is followed before its noise is known
_OPENED = 3  # maximum nodes created, as a multiple of those requested

NONE = -1

TextState = tuple[int, int]  # a state of the texts, and the number of matched tokens


class ContinuationSource(Protocol):
    """A model of how texts continue."""

    def walk(self, place: TextState, token: int) -> TextState: ...

    def next_tokens(self, place: TextState) -> Sequence[tuple[int, float]]:
        """Return the next tokens and their probabilities, above 0 and below 1, likeliest first."""


def grow_subtree(
    texts: ContinuationSource,
    place: TextState,
    position: int,
    noise: GumbelNoise | None,
    most: int,
    floor: float,
    max_depth: int,
) -> Subtree:
    """Return the best `most` nodes below a place, as in `Lookup.continuations`. position: position of the
    first level.
    """
    subtree = _SubtreeBuilder(texts, place, max_depth)
    unopened = [(0.0, NONE)]  # a heap: minus the score of a node's path, and the node
    least = floor
    while unopened and len(subtree.token) < _OPENED * most:
        nodes = [heapq.heappop(unopened)[1] for _ in range(min(_TOGETHER, len(unopened)))]
        first = len(subtree.token)
        for node in nodes:
            subtree.expand_path(node, least)
        subtree.score_nodes(first, position, noise)
        for node in range(first, len(subtree.token)):
            if not subtree.opened[node] and subtree.score[node] >= least:
                heapq.heappush(unopened, (-subtree.score[node], node))
        if len(subtree.token) >= most:
            least = max(least, heapq.nlargest(most, subtree.score)[-1])
            unopened = [entry for entry in unopened if -entry[0] > least]
            heapq.heapify(unopened)
    return subtree.best(most, floor)


class _SubtreeBuilder:
    """The nodes so far, in order of creation: parents first."""

    def __init__(self, texts: ContinuationSource, place: TextState, max_depth: int) -> None:
        self._texts, self._root, self._max_depth = texts, place, max_depth
        self.parent: list[int] = []
        self.token: list[int] = []
        self.score: list[float] = []  # log-probability of the path, including noise
        self.opened: list[bool] = []
        self._depth: list[int] = []
        self._place: list[TextState | None] = []  # known once a node is opened
        self._log_prob: list[float] = []  # given the parent
        self._probability: list[float] = []  # given the parent, without noise

    def expand_path(self, node: int, least: float) -> None:
        """Open a node and continue with its likeliest child while the path is likely without noise.

        Paths less likely than `least` are not followed.
        """
        path = 1.0
        bound = max(_FOLLOWED, math.exp(least - self.score[node]) if node != NONE else math.exp(least))
        while self._depth_of(node) < self._max_depth:
            guesses = self._open(node)
            if not guesses:
                break
            node = len(self.token) - len(guesses)
            path *= guesses[0][1]
            if path < bound:
                break

    def score_nodes(self, first: int, position: int, noise: GumbelNoise | None) -> None:
        """Compute the scores of the nodes from `first` on."""
        probability = np.array(self._probability[first:])
        if noise is None:
            logs = np.log(probability)
        else:
            positions = [position + depth - 1 for depth in self._depth[first:]]
            logs = log_prob_given_noise(probability, gumbel_at(noise.key, positions, self.token[first:]))
        for node, log_prob in enumerate(logs.tolist(), first):
            parent = self.parent[node]
            self._log_prob.append(log_prob)
            self.score.append(log_prob if parent == NONE else log_prob + self.score[parent])

    def best(self, most: int, floor: float) -> Subtree:
        """Return the `most` likeliest nodes with at least log-probability `floor`."""
        enough = [node for node, score in enumerate(self.score) if score >= floor]
        # A parent is no less likely than its children, and ties go to the earlier node.
        kept = sorted(heapq.nsmallest(most, enough, key=lambda node: -self.score[node]))
        index = {node: number for number, node in enumerate(kept)}
        return Subtree(
            parent=[index.get(self.parent[node], NONE) for node in kept],
            token=[self.token[node] for node in kept],
            log_prob=[self._log_prob[node] for node in kept],
        )

    def _open(self, node: int) -> Sequence[tuple[int, float]]:
        """Append a node's children and return them."""
        place = self._place_of(node)
        guesses = self._texts.next_tokens(place)
        if node != NONE:
            self.opened[node] = True
        count = len(guesses)
        self.parent += [node] * count
        self.token += [token for token, _ in guesses]
        self._probability += [probability for _, probability in guesses]
        self._depth += [self._depth_of(node) + 1] * count
        self._place += [None] * count
        self.opened += [False] * count
        return guesses

    def _depth_of(self, node: int) -> int:
        return 0 if node == NONE else self._depth[node]

    def _place_of(self, node: int) -> TextState:
        if node == NONE:
            return self._root
        place = self._place[node]
        if place is None:
            place = self._texts.walk(self._place_of(self.parent[node]), self.token[node])
            self._place[node] = place
        return place

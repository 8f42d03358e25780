"""Several opinions about the same children, made into one: a mixture whose weights follow who was right.

Where two sources guess at the children of a node, a child's probability is the weighted mean of theirs. What
each is worth is learnt from what the target picked, by Bayes' rule with some forgetting (the fixed share of
Herbster and Warmuth 1998), apart for cases in which lookups are more sure or less. A lookup knows a few
continuations and nothing of the rest: what it leaves over is shared out as the others have it.

Letters: S sources, C children.
"""

import numpy as np
from numpy.typing import NDArray

_LEVELS = (0.3, 0.7, 0.9, 0.97)  # of a lookup's surest guess, between which cases are told apart
_LEAST = 1e-3  # probability that a source is taken to give to what it did not list
_SHARE = 0.02  # of the weights, back to where they began with each observation
# Of a lookup's weight beside a drafter's, before anything is seen: the drafter has read the text as well, and
# where it disagrees it will have a reason.
_LOOKUP = 0.2


class Blended:
    """The weights of S sources, of which those from `lookups_from` on are lookups."""

    def __init__(self, sources: int, lookups_from: int) -> None:
        self._is_lookup = np.arange(sources) >= lookups_from
        self._weights: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def combine(self, said: NDArray[np.float32]) -> NDArray[np.float64]:
        """Log-probabilities [C], at most 0, of C children by what each of S sources says of them, [S, C].

        A source that guessed at this node, but not at that child, says -inf; one that did not guess, NaN.
        """
        spoke, probability = self._opinions(said)
        weights = self._of(spoke, said)
        mixed = weights @ probability / weights.sum()
        with np.errstate(divide="ignore"):
            likely: NDArray[np.float64] = np.log(mixed / max(float(mixed.sum()), 1.0))
        return likely

    def learn(self, said: NDArray[np.float32], picked: int | None) -> None:
        """The target picked this one of the children [S, C], or none of them."""
        spoke, probability = self._opinions(said)
        if spoke.sum() < 2:
            return
        weights = self._of(spoke, said)
        likely = 1.0 - probability.sum(axis=1) if picked is None else probability[:, picked]
        posterior = weights * np.maximum(likely, _LEAST)
        posterior = (1 - _SHARE) * posterior / posterior.sum() + _SHARE * self._first(spoke)
        self._weights[self._case(spoke, said)] = np.where(spoke, posterior, 0.0)

    def _opinions(self, said: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Who spoke [S], and the probability that each gives each child, [S, C], zero where it was silent."""
        silent = np.asarray(np.isnan(said).all(axis=1))
        probability: NDArray[np.float64] = np.exp(_known(said), dtype=np.float64)
        whole = ~silent & ~self._is_lookup
        if whole.any():
            others = probability[whole].mean(axis=0)
            rest = np.maximum(1.0 - probability.sum(axis=1, keepdims=True), 0.0)
            probability += np.where((~silent & self._is_lookup)[:, None], rest * others, 0.0)
        return ~silent, probability

    def _of(self, spoke: NDArray[np.bool_], said: NDArray[np.float32]) -> NDArray[np.float64]:
        known = self._weights.get(self._case(spoke, said))
        return self._first(spoke) if known is None else known

    def _first(self, spoke: NDArray[np.bool_]) -> NDArray[np.float64]:
        weights = np.where(spoke, np.where(self._is_lookup, _LOOKUP, 1.0), 0.0)
        return np.asarray(weights / weights.sum())

    def _case(self, spoke: NDArray[np.bool_], said: NDArray[np.float32]) -> tuple[int, ...]:
        """Who spoke, and how sure lookups are: -1 for who is silent."""
        surest = np.exp(_known(said).max(axis=1))
        levels = np.searchsorted(_LEVELS, np.where(self._is_lookup, surest, 0.0))
        return tuple(np.where(spoke, levels, -1).tolist())


def _known(said: NDArray[np.float32]) -> NDArray[np.float32]:
    """-inf in the place of silence."""
    return np.where(np.isnan(said), np.float32(-np.inf), said)

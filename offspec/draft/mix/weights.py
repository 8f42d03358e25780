"""Mixture of the predictions of several sources for the same children, with learned weights.

If two sources propose children of one node, a child's probability is the weighted mean of theirs. The weights
are learned from the target's picks, by Bayes' rule with some forgetting (the fixed share of Herbster and
Warmuth 1998), separately for cases in which lookups are more or less certain. A lookup knows a few
continuations only: the probability that it leaves over is distributed as the other sources predict.

Letters: S sources, C children.
"""

import numpy as np
from numpy.typing import NDArray

_LEVELS = (0.3, 0.7, 0.9, 0.97)  # of a lookup's top probability: boundaries between cases
_LEAST = 1e-3  # probability attributed to a source for tokens it did not list
_SHARE = 0.02  # share of the weights that returns to the prior with each observation
# Prior weight of a lookup next to a drafter: the drafter has read the text as well, so a disagreement
# usually has a reason.
_LOOKUP = 0.2


class MixtureWeights:
    """Weights of S sources; sources from `lookups_from` on are lookups."""

    def __init__(self, sources: int, lookups_from: int) -> None:
        self._is_lookup = np.arange(sources) >= lookups_from
        self._weights: dict[tuple[int, ...], NDArray[np.float64]] = {}

    def combine(self, log_probs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return log-probabilities [C], at most 0, of C children, given those of each of S sources, [S, C].

        A source that proposed children of this node, but not this one, gives -inf; a source without a
        prediction, NaN.
        """
        spoke, probability = self._probabilities(log_probs)
        weights = self._of(spoke, log_probs)
        mixed = weights @ probability / weights.sum()
        with np.errstate(divide="ignore"):
            likely: NDArray[np.float64] = np.log(mixed / max(float(mixed.sum()), 1.0))
        return likely

    def learn(self, log_probs: NDArray[np.float32], picked: int | None) -> None:
        """Learn which of the children [S, C] the target picked, if any."""
        spoke, probability = self._probabilities(log_probs)
        if spoke.sum() < 2:
            return
        weights = self._of(spoke, log_probs)
        likely = 1.0 - probability.sum(axis=1) if picked is None else probability[:, picked]
        posterior = weights * np.maximum(likely, _LEAST)
        posterior = (1 - _SHARE) * posterior / posterior.sum() + _SHARE * self._first(spoke)
        self._weights[self._case(spoke, log_probs)] = np.where(spoke, posterior, 0.0)

    def _probabilities(self, said: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Return which sources have a prediction [S], and their probabilities [S, C], zero without a
        prediction.
        """
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
        """Return the case for the weights: how certain each source with a prediction is, -1 for the
        others.
        """
        surest = np.exp(_known(said).max(axis=1))
        levels = np.searchsorted(_LEVELS, np.where(self._is_lookup, surest, 0.0))
        return tuple(np.where(spoke, levels, -1).tolist())


def _known(said: NDArray[np.float32]) -> NDArray[np.float32]:
    """Replace NaN by -inf."""
    return np.where(np.isnan(said), np.float32(-np.inf), said)

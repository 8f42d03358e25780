"""Keeping a draft honest: learn, while decoding, how sharp its scores should be read.

The draft says x = its log-probability over the temperature, plus noise where decoding is coupled; the
probability that the target picks token t is modelled as softmax(x / tau)[t]. tau is fitted by stochastic
gradient descent on -log of that, for the token that was committed at every node the target walked.
"""

import math

import numpy as np
from numpy.typing import NDArray

_RATE = 0.02
_STEP_LIMIT = 8.0  # one surprising token must not blow the temperature up
_RANGE = (0.2, 5.0)


class TemperatureFit:
    """tau, and one step of descent for each observation."""

    def __init__(self, tau: float = 1.0) -> None:
        self._log_tau = math.log(tau)
        self.observations = 0

    @property
    def tau(self) -> float:
        return math.exp(self._log_tau)

    def observe(self, scores: NDArray[np.float32], log_probs: NDArray[np.float32], rank: int | None) -> None:
        """Learn from one node: its children's x [K] and calibrated log-probabilities [K], best first.

        rank is the place of the committed token among them, None when it was none of them.
        """
        inside = np.exp(log_probs.astype(np.float64))
        # What is not among the K is one more outcome, placed just below the last.
        outside = max(1.0 - float(inside.sum()), 0.0)
        below = float(scores[-1]) - 1.0
        mean = float(inside @ scores) + outside * below
        chosen = below if rank is None else float(scores[rank])
        gradient = (chosen - mean) / self.tau  # of the log-likelihood, by log(1 / tau)
        if not math.isfinite(gradient):
            return  # a draft that overflowed has nothing to teach
        self._log_tau -= _RATE * min(max(gradient, -_STEP_LIMIT), _STEP_LIMIT)
        self._log_tau = min(max(self._log_tau, math.log(_RANGE[0])), math.log(_RANGE[1]))
        self.observations += 1

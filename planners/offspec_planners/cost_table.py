"""Costs in tables, for those who ask a million times: replays of recorded trees under every setting."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from offspec_planners.cost import PassCosts


@dataclass(frozen=True, slots=True)
class Tabulated:
    """`passes` [rows + 1] and `steps` [width + 1], seconds by rows and by width; see `PassCosts`."""

    start: float
    link: float
    passes: NDArray[np.float64]
    steps: NDArray[np.float64]

    def step_seconds(self, width: int) -> np.float64:
        """As `PassCosts.step_seconds`, of whole numbers."""
        return np.float64(self.steps[width])

    def iteration(
        self, draft: float | NDArray[np.float64], rows: int | NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """As `PassCosts.iteration`, of whole numbers."""
        return np.asarray(np.maximum(draft + self.passes[rows], self.link))


@lru_cache(maxsize=256)
def tabulated(costs: PassCosts, rows: int, width: int) -> Tabulated:
    """The costs of passes of up to so many rows, and of steps of up to so many nodes."""
    passes, steps = costs.pass_seconds(np.arange(rows + 1)), costs.step_seconds(np.arange(width + 1))
    return Tabulated(costs.start, costs.link, passes, steps)

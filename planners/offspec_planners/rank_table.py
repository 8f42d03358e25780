"""Where a draft is right more often than it thinks, and where less often: by depth and by rank.

A table of what the target picked against what the draft's scores made one expect, for the r-th child of a
node at depth d, counted at the nodes that the target walked. Letters: W nodes, D depths, K ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from offspec_planners.json_fields import Number, complain

DEPTHS, RANKS = 16, 32
FORGET = 0.995  # of what is counted, kept from pass to pass

_PRIOR = 20.0  # observations that no correction, and the general guess, count for
_FACTOR = (0.2, 5.0)

# How often a child is picked by rank, of no draft in particular.
_PICKED = np.array([0.75, *(0.12 / np.arange(1, RANKS) ** 2)])


_Row = Annotated[tuple[Number, ...], Meta(min_length=RANKS, max_length=RANKS)]
_Table = Annotated[
    tuple[_Row, ...],
    Meta(min_length=DEPTHS, max_length=DEPTHS, description=f"{DEPTHS} x {RANKS} numbers of 0 or more"),
]


@dataclass(frozen=True, slots=True)
class SavedTable:
    """A table in a file."""

    visits: Annotated[
        tuple[Number, ...],
        Meta(min_length=DEPTHS, max_length=DEPTHS, description=f"{DEPTHS} numbers of 0 or more"),
    ]
    hits: _Table
    expected: _Table


class DepthRank:
    """By depth of a node and rank of its child: how often the child was picked, against what was expected.

    Depth 0 is the root; whatever is deeper than the table counts as its last row. A cell is shrunk towards
    its rank at all depths, and that towards no correction.
    """

    def __init__(self) -> None:
        self.visits = np.zeros(DEPTHS)
        self.hits = np.zeros((DEPTHS, RANKS))
        self.expected = np.zeros((DEPTHS, RANKS))  # by the temperature alone
        # What is added to a child's log-probability before all are made to sum to one again.
        self.log_factors = np.zeros((DEPTHS, RANKS), np.float32)

    def apply(self, log_probs: NDArray[np.float32], depths: Sequence[int]) -> NDArray[np.float32]:
        """Correct the log-probabilities [W, K] of the children of nodes at these depths [W]; at most 0."""
        rows = np.minimum(np.asarray(depths, dtype=np.int64), DEPTHS - 1)
        factors = self.log_factors[rows, : log_probs.shape[1]]
        # The tokens that are not among the K keep their probabilities until all are divided by the sum.
        total = 1.0 + (np.expm1(factors) * np.exp(log_probs)).sum(axis=1, keepdims=True)
        corrected: NDArray[np.float32] = np.minimum(log_probs + factors - np.log(total), 0.0)
        return corrected

    def observe(self, depth: int, log_probs: NDArray[np.float32], rank: int | None) -> None:
        """Count one walked node, the corrected log-probabilities [K] of its children, and what was picked."""
        row, count = min(depth, DEPTHS - 1), len(log_probs)
        if np.isnan(log_probs).any():
            return
        self.expected[row, :count] += np.exp(log_probs - self.log_factors[row, :count])
        self.visits[row] += 1
        if rank is not None:
            self.hits[row, rank] += 1

    def settle(self) -> None:
        """After a pass: forget a little, and let corrections follow from what was counted."""
        for counts in (self.visits, self.hits, self.expected):
            counts *= FORGET
        self.refresh()

    def refresh(self) -> None:
        """Work the corrections out from the counts."""
        by_rank = (self.hits.sum(axis=0) + _PRIOR) / (self.expected.sum(axis=0) + _PRIOR)
        factors = by_rank * (self.hits + _PRIOR) / (self.expected * by_rank + _PRIOR)
        self.log_factors = np.log(np.clip(factors, *_FACTOR)).astype(np.float32)

    def acceptance(self) -> NDArray[np.float64]:
        """[D, K]: how often the target picks the child of a rank at a node that it walks."""
        by_rank = (self.hits.sum(axis=0) + _PRIOR * _PICKED) / (self.visits.sum() + _PRIOR)
        picked: NDArray[np.float64] = (self.hits + _PRIOR * by_rank) / (self.visits[:, None] + _PRIOR)
        return picked

    def to_json(self) -> dict[str, Any]:
        names = ("visits", "hits", "expected")
        return {name: np.round(getattr(self, name), 4).tolist() for name in names}

    @classmethod
    def from_json(cls, saved: SavedTable) -> "DepthRank":
        """Raises ValueError, one line: the key, what it is, what it should be."""
        table = cls()
        table.visits, table.hits, table.expected = map(np.array, (saved.visits, saved.hits, saved.expected))
        if (table.hits.sum(axis=1) > table.visits + 1e-3 * (1 + table.visits)).any():
            complain("table.hits", saved.hits, "no more in a row than its visits")
        table.refresh()
        return table

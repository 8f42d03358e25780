"""Calibration of a draft: learning, while decoding, how its scores translate to acceptance.

The draft's score is x = its log-probability over the temperature, plus noise if decoding is coupled. The
probability that the target picks token t is modelled as softmax(x / tau)[t], corrected by a table of observed
over expected picks, by the depth of the node and the rank of the token. Both are learned from the nodes that
verification walked; there the target's choice is known whether or not it was in the tree.

Letters: W nodes, D depths of the table, K ranks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from offspec_planners.json_fields import Number, Whole, complain, read
from offspec_planners.tree_growth import RecordedTree
from offspec_planners.typical_acceptance import MODEL, TypicalDraft, draw_forest

VERSION = 1
FOREST = 48  # number of recorded trees to keep, the latest ones

_FIRST_RATE, _LAST_RATE, _HALVED_AFTER = 0.1, 0.005, 40
_STEP_LIMIT = 4.0  # limits the effect of one surprising token on the temperature
_TAU = (0.2, 5.0)

_PRIOR_TOKENS = 20.0  # initial count of both expected and observed tokens
_CORRECTION = (0.5, 2.0)

# Effect of a small model's share of the target's weights on its predictions. Published: 8.6 tok/s with an 8B
# on an RTX 4090, 6.1 with a 1B on a 4070 Ti (UMbreLLa, Llama-3.1-70B): adjusted for the seconds of their
# passes, the 1B yields three quarters of the tokens at equal nodes. Between and beyond, the logarithm of a
# draft token's probability scales with the logarithm of the share; larger models are assumed to be no better.
_WORSE = 0.095  # change of a draft token's log-probability per factor e in size

DEPTHS, RANKS = 16, 32  # of the table
DECAY = 0.995  # factor applied to all counts after each pass

_PRIOR = 20.0  # weight of the priors (no correction, typical acceptance) in observations
_FACTOR = (0.2, 5.0)

# Typical probability that a child is picked, by rank.
_PICKED = np.array([0.75, *(0.12 / np.arange(1, RANKS) ** 2)])

_Row = Annotated[tuple[Number, ...], Meta(min_length=RANKS, max_length=RANKS)]
_Table = Annotated[
    tuple[_Row, ...],
    Meta(min_length=DEPTHS, max_length=DEPTHS, description=f"{DEPTHS} x {RANKS} numbers of 0 or more"),
]


@dataclass(frozen=True, slots=True)
class _SavedTable:
    """Saved form of a table."""

    visits: Annotated[
        tuple[Number, ...],
        Meta(min_length=DEPTHS, max_length=DEPTHS, description=f"{DEPTHS} numbers of 0 or more"),
    ]
    hits: _Table
    expected: _Table


class DepthRankTable:
    """Table of how often children were picked, against expectation, by node depth and child rank.

    Depth 0 is the root; deeper nodes than the table's last row count in that row. A cell is shrunk towards
    its rank's mean over all depths, and that mean towards no correction.
    """

    def __init__(self) -> None:
        self.visits = np.zeros(DEPTHS)
        self.hits = np.zeros((DEPTHS, RANKS))
        self.expected = np.zeros((DEPTHS, RANKS))  # from the temperature alone
        # Added to a child's log-probability before normalizing the sum to one again.
        self.log_factors = np.zeros((DEPTHS, RANKS), np.float32)

    def apply(self, log_probs: NDArray[np.float32], depths: Sequence[int]) -> NDArray[np.float32]:
        """Return corrected log-probabilities [W, K], at most 0, of the children of nodes at depths [W]."""
        rows = np.minimum(np.asarray(depths, dtype=np.int64), DEPTHS - 1)
        factors = self.log_factors[rows, : log_probs.shape[1]]
        # Tokens that are not among the K keep their probabilities until all are divided by the sum.
        total = 1.0 + (np.expm1(factors) * np.exp(log_probs)).sum(axis=1, keepdims=True)
        corrected: NDArray[np.float32] = np.minimum(log_probs + factors - np.log(total), 0.0)
        return corrected

    def observe(self, depth: int, log_probs: NDArray[np.float32], rank: int | None) -> None:
        """Count one walked node, given its children's corrected log-probabilities [K] and the picked rank."""
        row, count = min(depth, DEPTHS - 1), len(log_probs)
        if np.isnan(log_probs).any():
            return
        self.expected[row, :count] += np.exp(log_probs - self.log_factors[row, :count])
        self.visits[row] += 1
        if rank is not None:
            self.hits[row, rank] += 1

    def end_pass(self) -> None:
        """Decay the counts after a pass and recompute the corrections."""
        for counts in (self.visits, self.hits, self.expected):
            counts *= DECAY
        self.refresh()

    def refresh(self) -> None:
        """Compute the corrections from the counts."""
        by_rank = (self.hits.sum(axis=0) + _PRIOR) / (self.expected.sum(axis=0) + _PRIOR)
        factors = by_rank * (self.hits + _PRIOR) / (self.expected * by_rank + _PRIOR)
        self.log_factors = np.log(np.clip(factors, *_FACTOR)).astype(np.float32)

    def acceptance(self) -> NDArray[np.float64]:
        """Return [D, K]: how often the target picks the child of a rank at a walked node."""
        by_rank = (self.hits.sum(axis=0) + _PRIOR * _PICKED) / (self.visits.sum() + _PRIOR)
        picked: NDArray[np.float64] = (self.hits + _PRIOR * by_rank) / (self.visits[:, None] + _PRIOR)
        return picked

    def to_json(self) -> dict[str, Any]:
        names = ("visits", "hits", "expected")
        return {name: np.round(getattr(self, name), 4).tolist() for name in names}

    @classmethod
    def from_json(cls, saved: _SavedTable) -> "DepthRankTable":
        """Load a table. Raises ValueError in one line: the key, its value, the expected value."""
        table = cls()
        table.visits, table.hits, table.expected = map(np.array, (saved.visits, saved.hits, saved.expected))
        if (table.hits.sum(axis=1) > table.visits + 1e-3 * (1 + table.visits)).any():
            complain("table.hits", saved.hits, "no more in a row than its visits")
        table.refresh()
        return table


class TemperatureFit:
    """Fit of tau by one gradient step per observation, large steps at first, small ones later."""

    def __init__(self, tau: float = 1.0, observations: int = 0) -> None:
        self._log_tau = math.log(tau)
        self.observations = observations

    @property
    def tau(self) -> float:
        return math.exp(self._log_tau)

    def observe(self, scores: NDArray[np.float32], log_probs: NDArray[np.float32], rank: int | None) -> None:
        """Learn from one node: its children's x [K] and calibrated log-probabilities [K], best first.

        rank is the rank of the committed token among them, None if it is not one of them.
        """
        if not math.isfinite(scores[0]):
            return  # skip drafts that overflowed
        possible = np.isfinite(scores)  # best first, so ranks do not change; the others were masked
        scores, log_probs = scores[possible], log_probs[possible]
        inside = np.exp(log_probs.astype(np.float64))
        # All tokens outside the K form one more outcome, placed just below the last.
        outside = max(1.0 - float(inside.sum()), 0.0)
        below = float(scores[-1]) - 1.0
        mean = float(inside @ scores) + outside * below
        chosen = below if rank is None else float(scores[rank])
        gradient = (chosen - mean) / self.tau  # of the log-likelihood with respect to log(1 / tau)
        if not math.isfinite(gradient):
            return  # skip drafts that overflowed
        rate = max(_FIRST_RATE / (1 + self.observations / _HALVED_AFTER), _LAST_RATE)
        self._log_tau -= rate * min(max(gradient, -_STEP_LIMIT), _STEP_LIMIT)
        self._log_tau = min(max(self._log_tau, math.log(_TAU[0])), math.log(_TAU[1]))
        self.observations += 1


@dataclass(frozen=True, slots=True)
class _Saved:
    """Saved form of a calibration."""

    offspec_calibration: Annotated[
        int, Meta(ge=VERSION, le=VERSION, description=f"{VERSION}, the version that this program reads")
    ]
    tau: Annotated[float, Meta(ge=_TAU[0], le=_TAU[1], description=f"between {_TAU[0]} and {_TAU[1]}")]
    observations: Whole
    table: _SavedTable
    expected: Number
    observed: Number
    passes: Whole
    forest: list[RecordedTree]


@dataclass(slots=True, eq=False)
class Calibration:
    """Measured agreement of a target with a draft, at one temperature, coupled or not.

    `forest` holds recorded trees; `expected` and `observed` are sums of tokens per pass, with older passes
    decayed; `passes` counts them.
    """

    fit: TemperatureFit = field(default_factory=TemperatureFit)
    table: DepthRankTable = field(default_factory=DepthRankTable)
    forest: list[RecordedTree] = field(default_factory=list)
    expected: float = 0.0
    observed: float = 0.0
    passes: int = 0

    @property
    def correction(self) -> float:
        """Factor from expected to observed tokens, from the passes so far."""
        share = (self.observed + _PRIOR_TOKENS) / (self.expected + _PRIOR_TOKENS)
        return min(max(share, _CORRECTION[0]), _CORRECTION[1])

    def observe(
        self, depth: int, x: NDArray[np.float32], log_probs: NDArray[np.float32], rank: int | None
    ) -> None:
        """Learn from one walked node.

        Args:
            depth: Depth of the node, 0 for the root.
            x: [K], scores of its children, best first.
            log_probs: [K], their calibrated log-probabilities.
            rank: Rank of the committed token among them; None if it is not one of them.
        """
        self.fit.observe(x, log_probs, rank)
        self.table.observe(depth, log_probs, rank)

    def end_pass(self, expected: float, observed: int) -> None:
        """Count a pass, after its nodes: the expected tokens of its tree, and the tokens it yielded."""
        self.expected = self.expected * DECAY + expected
        self.observed = self.observed * DECAY + observed
        self.passes += 1
        self.table.end_pass()

    def remember(self, tree: RecordedTree) -> None:
        """Keep a recorded tree, replacing the oldest if there are too many."""
        self.forest = [*self.forest, tree][-FOREST:]

    def acceptance(self) -> NDArray[np.float64]:
        """Return [depth, rank] probabilities that a walked node's child is picked; typical ones if unseen."""
        return self.table.acceptance()

    def to_json(self) -> dict[str, Any]:
        return {
            "offspec_calibration": VERSION,
            "tau": round(self.fit.tau, 6),
            "observations": self.fit.observations,
            "table": self.table.to_json(),
            "expected": self.expected,
            "observed": self.observed,
            "passes": self.passes,
            "forest": [tree.to_json() for tree in self.forest],
        }

    @classmethod
    def from_json(cls, found: object) -> "Calibration":
        """Load a calibration. Raises ValueError in one line: the key, its value, the expected value."""
        if isinstance(found, dict) and isinstance(rows := found.get("forest"), list):
            forest = [RecordedTree.from_json(row, f"forest[{index}].") for index, row in enumerate(rows)]
            found = {**found, "forest": forest}
        saved = read(found, _Saved)
        return cls(
            fit=TemperatureFit(saved.tau, saved.observations),
            table=DepthRankTable.from_json(saved.table),
            forest=saved.forest[-FOREST:],
            expected=saved.expected,
            observed=saved.observed,
            passes=saved.passes,
        )


def rounded(known: Calibration, bits: int) -> Calibration:
    """Return the calibration expected of a 16-bit draft after quantizing its weights to `bits`."""
    return _worse(known, MODEL.by_bits[bits])


def _worse(known: Calibration, power: float) -> Calibration:
    """Raise each draft token's probability to `power`; 1 changes nothing."""
    forest = [RecordedTree(tree.parent, tree.score * np.float32(power)) for tree in known.forest]
    visits = known.table.visits[:, None]
    hits = visits * (known.table.hits / np.maximum(visits, 1e-9)) ** power
    return replace(known, table=_table(visits[:, 0], hits), forest=forest)


def _table(visits: NDArray[np.float64], hits: NDArray[np.float64]) -> DepthRankTable:
    """Build a table whose picks equal their expectation."""
    table = DepthRankTable()
    table.visits, table.hits, table.expected = visits.copy(), hits.copy(), hits.copy()
    return table


def typical(draft: TypicalDraft, share: float | None = None, bits: int | None = None) -> Calibration:
    """Return the acceptance of a typical draft, used until the draft has been measured.

    Based on randomly drawn trees, always the same ones. A 4-bit self-draft's trees have 11 expected tokens in
    256 nodes; those of an 8B for a 70B 11.7 in 768, of a 1B 8.3; those of a head 2.4 in 64.

    Args:
        draft: Kind of draft, such as SELF_DRAFT, MODEL or HEAD.
        share: Draft weights over target weights. Default None: the share in `draft`.
        bits: Bits of the draft's weights. Default None: 4 for a self-draft, unquantized for a model.
    """
    forest, walks = draw_forest(draft.mean, draft.spread, DEPTHS)
    known = Calibration(table=_table(walks.visits, walks.hits), forest=forest)
    power = draft.power
    if share is not None and draft.share is not None:
        power += round(_WORSE * max(math.log(draft.share / share), 0.0), 3)
    return _worse(known, power * draft.by_bits[bits] if bits else power)

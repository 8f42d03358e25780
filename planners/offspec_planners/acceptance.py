"""Keeping a draft honest: learn, while decoding, how its scores should be read.

The draft says x = its log-probability over the temperature, plus noise where decoding is coupled. The
probability that the target picks token t is modelled as softmax(x / tau)[t], corrected by a table: what
was picked against what was expected, by the depth of the node and the rank of the token. Both are learned
from the nodes that the target walked, where its choice is known whether it was in the tree or not.

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
from offspec_planners.tree_growth import Grown
from offspec_planners.typical_acceptance import MODEL, TypicalDraft, draw_forest

VERSION = 1
FOREST = 48  # recorded trees that are kept, the latest

_FIRST_RATE, _LAST_RATE, _HALVED_AFTER = 0.1, 0.005, 40
_STEP_LIMIT = 4.0  # one surprising token must not blow the temperature up
_TAU = (0.2, 5.0)

_PRIOR_TOKENS = 20.0  # expected and observed alike before there are any
_CORRECTION = (0.5, 2.0)

# How a small model's guesses go with its share of the target's weights. Published: 8.6 tok/s with an 8B on an
# RTX 4090, 6.1 with a 1B on a 4070 Ti (UMbreLLa, Llama-3.1-70B): by the seconds of their passes, that is
# three quarters of the tokens with the 1B, at equal nodes. In between and beyond, the logarithm of a guess's
# probability goes with that of the share; what is larger is taken to be no better.
_WORSE = 0.095  # of a guess's log-probability, for each factor e that a draft is smaller

DEPTHS, RANKS = 16, 32  # of the table
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
class _SavedTable:
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
    def from_json(cls, saved: _SavedTable) -> "DepthRank":
        """Raises ValueError, one line: the key, what it is, what it should be."""
        table = cls()
        table.visits, table.hits, table.expected = map(np.array, (saved.visits, saved.hits, saved.expected))
        if (table.hits.sum(axis=1) > table.visits + 1e-3 * (1 + table.visits)).any():
            complain("table.hits", saved.hits, "no more in a row than its visits")
        table.refresh()
        return table


class TemperatureFit:
    """tau, and one step of descent for each observation: large ones at first, small ones later."""

    def __init__(self, tau: float = 1.0, observations: int = 0) -> None:
        self._log_tau = math.log(tau)
        self.observations = observations

    @property
    def tau(self) -> float:
        return math.exp(self._log_tau)

    def observe(self, scores: NDArray[np.float32], log_probs: NDArray[np.float32], rank: int | None) -> None:
        """Learn from one node: its children's x [K] and calibrated log-probabilities [K], best first.

        rank is the place of the committed token among them, None when it was none of them.
        """
        if not math.isfinite(scores[0]):
            return  # a draft that overflowed has nothing to teach
        possible = np.isfinite(scores)  # the best come first, so ranks stay; others were closed by a rule
        scores, log_probs = scores[possible], log_probs[possible]
        inside = np.exp(log_probs.astype(np.float64))
        # What is not among the K is one more outcome, placed just below the last.
        outside = max(1.0 - float(inside.sum()), 0.0)
        below = float(scores[-1]) - 1.0
        mean = float(inside @ scores) + outside * below
        chosen = below if rank is None else float(scores[rank])
        gradient = (chosen - mean) / self.tau  # of the log-likelihood, by log(1 / tau)
        if not math.isfinite(gradient):
            return  # a draft that overflowed has nothing to teach
        rate = max(_FIRST_RATE / (1 + self.observations / _HALVED_AFTER), _LAST_RATE)
        self._log_tau -= rate * min(max(gradient, -_STEP_LIMIT), _STEP_LIMIT)
        self._log_tau = min(max(self._log_tau, math.log(_TAU[0])), math.log(_TAU[1]))
        self.observations += 1


@dataclass(frozen=True, slots=True)
class _Saved:
    """A calibration in a file."""

    offspec_calibration: Annotated[
        int, Meta(ge=VERSION, le=VERSION, description=f"{VERSION}, the version that this program reads")
    ]
    tau: Annotated[float, Meta(ge=_TAU[0], le=_TAU[1], description=f"between {_TAU[0]} and {_TAU[1]}")]
    observations: Whole
    table: _SavedTable
    expected: Number
    observed: Number
    passes: Whole
    forest: list[Grown]


@dataclass(slots=True, eq=False)
class Calibration:
    """What is known of how a target agrees with a draft, at one temperature, coupled or not.

    `forest` holds recorded trees; `expected` and `observed` are sums of tokens per pass, older passes
    counting less; `passes` counts them.
    """

    fit: TemperatureFit = field(default_factory=TemperatureFit)
    table: DepthRank = field(default_factory=DepthRank)
    forest: list[Grown] = field(default_factory=list)
    expected: float = 0.0
    observed: float = 0.0
    passes: int = 0

    @property
    def correction(self) -> float:
        """What an expectation is to be multiplied with, going by the passes so far."""
        share = (self.observed + _PRIOR_TOKENS) / (self.expected + _PRIOR_TOKENS)
        return min(max(share, _CORRECTION[0]), _CORRECTION[1])

    def observe(
        self, depth: int, x: NDArray[np.float32], log_probs: NDArray[np.float32], rank: int | None
    ) -> None:
        """Learn from one walked node.

        Args:
            depth: Of the node, 0 for the root.
            x: [K], scores of its children, best first.
            log_probs: [K], their calibrated log-probabilities.
            rank: Place of the committed token among them; None when it was none of them.
        """
        self.fit.observe(x, log_probs, rank)
        self.table.observe(depth, log_probs, rank)

    def end_pass(self, expected: float, observed: int) -> None:
        """Count a pass, after its nodes: the tokens expected of its tree, and those that it gave."""
        self.expected = self.expected * FORGET + expected
        self.observed = self.observed * FORGET + observed
        self.passes += 1
        self.table.settle()

    def remember(self, tree: Grown) -> None:
        """Keep a recorded tree, in place of the oldest once there are many."""
        self.forest = [*self.forest, tree][-FOREST:]

    def acceptance(self) -> NDArray[np.float64]:
        """[depth, rank] probabilities that a walked node's child is picked; a general guess where unseen."""
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
        """Raises ValueError, one line: the key, what it is, what it should be."""
        if isinstance(found, dict) and isinstance(rows := found.get("forest"), list):
            forest = [Grown.from_json(row, f"forest[{index}].") for index, row in enumerate(rows)]
            found = {**found, "forest": forest}
        saved = read(found, _Saved)
        return cls(
            fit=TemperatureFit(saved.tau, saved.observations),
            table=DepthRank.from_json(saved.table),
            forest=saved.forest[-FOREST:],
            expected=saved.expected,
            observed=saved.observed,
            passes=saved.passes,
        )


def rounded(known: Calibration, bits: int) -> Calibration:
    """What is known of a draft in 16 bits, as it may be expected when its weights are rounded to `bits`."""
    return _worse(known, MODEL.by_bits[bits])


def _worse(known: Calibration, power: float) -> Calibration:
    """power: what each guess's probability is raised to; 1 leaves it as it is."""
    forest = [Grown(tree.parent, tree.score * np.float32(power)) for tree in known.forest]
    visits = known.table.visits[:, None]
    hits = visits * (known.table.hits / np.maximum(visits, 1e-9)) ** power
    return replace(known, table=_table(visits[:, 0], hits), forest=forest)


def _table(visits: NDArray[np.float64], hits: NDArray[np.float64]) -> DepthRank:
    """A table in which what was picked is what was expected."""
    table = DepthRank()
    table.visits, table.hits, table.expected = visits.copy(), hits.copy(), hits.copy()
    return table


def typical(draft: TypicalDraft, share: float | None = None, bits: int | None = None) -> Calibration:
    """The acceptance of a typical draft, used until the draft has been measured.

    From trees drawn at random, always the same ones. A substitute's in 4 bits hold 11 expected tokens in 256
    nodes; those of an 8B for a 70B 11.7 in 768, of a 1B 8.3; those of a head 2.4 in 64.

    Args:
        draft: Its kind, such as SUBSTITUTE, MODEL or HEAD.
        share: Its weights over the target's. Default None: those of `draft`.
        bits: Of the draft's weights. Default None: 4 of a substitute's, and a model as it is.
    """
    forest, walks = draw_forest(draft.mean, draft.spread, DEPTHS)
    known = Calibration(table=_table(walks.visits, walks.hits), forest=forest)
    power = draft.power
    if share is not None and draft.share is not None:
        power += round(_WORSE * max(math.log(draft.share / share), 0.0), 3)
    return _worse(known, power * draft.by_bits[bits] if bits else power)

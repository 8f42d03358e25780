"""Costs of on-demand experts: how many a pass requests, and how many of these must be loaded.

If every row chose k of E experts at random, n rows together would request U(n) = E (1 - (1 - k/E)^n) of
them, and a memory with the share f of all experts would hold the share f of those. Rows of a tree choose
similar experts, and some experts are chosen more often than others. So both have an exponent that is learned
while a model runs, by rows: U is evaluated at n^s, and f^r of the requested experts are resident.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from offspec_planners.json_fields import Count, Number, Points, Whole, read

_BINS = 12  # bins of row counts: around 1, 2, 4 and so on
_KEEP = 0.98  # decay per pass of earlier observations at such row counts
_PRIOR = 4.0  # weight of the assumption of independent choices, in passes
_FULL = 0.98  # share of a layer's experts above which a pass does not determine the exponent
_LEAST = 1e-3  # minimum hit rate
_BY_CHANCE: Points = ((1, 1.0),)  # exponent before any learning
_EXPONENTS = (1 / 16, 16.0)  # limits of exponents

Sources = Annotated[
    tuple[tuple[Annotated[float, Meta(ge=0, le=1)], Number], ...],
    Meta(min_length=1, description="a list of pairs [share, seconds], the shares from 0 to 1"),
]
_FARTHEST = 3.0  # largest absolute logarithm of these, rounded up
_Weights = Annotated[
    list[Annotated[float, Meta(ge=0, le=1e6)]],
    Meta(min_length=_BINS, max_length=_BINS, description=f"a list of {_BINS} numbers of 0 or more"),
]
_Means = Annotated[
    list[Annotated[float, Meta(ge=-_FARTHEST, le=_FARTHEST)]],
    Meta(min_length=_BINS, max_length=_BINS, description=f"a list of {_BINS} logarithms of exponents"),
]


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Routed experts of a model, all of one size.

    Args:
        count: Experts per layer.
        chosen: Experts chosen for each row.
        layers: Layers that have experts.
        nbytes: Stored bytes of one expert.
        weights: Weights of one expert.
        unpacked: Values of one expert that a pass dequantizes.
    """

    count: int
    chosen: int
    layers: tuple[int, ...]
    nbytes: int
    weights: int
    unpacked: float = 0.0

    @property
    def every(self) -> int:
        """Number of experts in all layers."""
        return self.count * len(self.layers)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the experts of one layer."""
        return self.count * self.nbytes

    def distinct_experts(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return distinct experts per layer requested by `rows` rows that choose at random."""
        return distinct_experts(self.count, self.chosen, rows)


def distinct_experts(count: int, chosen: int, rows: ArrayLike) -> NDArray[np.float64]:
    """Return E (1 - (1 - k/E)^n): distinct experts of E requested by n rows that each choose k at random."""
    return count * (1.0 - (1.0 - chosen / count) ** np.asarray(rows, np.float64))


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """Seconds to load requested experts that are not where they are computed.

    Args:
        layers: Number of layers with experts.
        count: Experts per layer.
        chosen: Experts chosen for each row.
        sources: (share, seconds), the nearest first: experts beyond that share of all are loaded over this
            link, each in that many seconds. With several links, the slowest determines the time.
        compute: (rows, seconds) of computing the experts of all layers, which overlaps loading.
        spread: (rows, exponent) of the rows; 1 for independent choices.
        reuse: (rows, exponent) of the resident share; 1 if all experts are equally likely.
    """

    layers: Count
    count: Count
    chosen: Count
    sources: Sources
    compute: Points = ((1, 0.0),)
    spread: Points = _BY_CHANCE
    reuse: Points = _BY_CHANCE

    @property
    def learnt(self) -> bool:
        """Whether these costs include measurements of the model's passes."""
        return (self.spread, self.reuse) != (_BY_CHANCE, _BY_CHANCE)

    def distinct_experts(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return distinct experts per layer requested by a pass of `rows` rows."""
        n = np.asarray(rows, np.float64)
        return distinct_experts(self.count, self.chosen, n ** _by_rows(self.spread, n))

    def hit_rate(self, rows: ArrayLike, source: int = 0) -> NDArray[np.float64]:
        """Return the share of requested experts that need no link, by default the nearest."""
        return np.asarray(self.sources[source][0] ** _by_rows(self.reuse, np.asarray(rows, np.float64)))

    def link_seconds(self, rows: ArrayLike, others: float = 0.0) -> NDArray[np.float64]:
        """Return seconds to load the experts missed by a pass of `rows` rows, over all layers.

        others: seconds for other weights on the nearest link. Default 0.
        """
        asked, slowest = self.layers * self.distinct_experts(rows), np.full(np.shape(rows), others)
        for source, (_, seconds) in enumerate(self.sources):
            missed = asked * (1.0 - self.hit_rate(rows, source))
            slowest = np.maximum(slowest, missed * seconds + (0.0 if source else others))
        return slowest

    def wait_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Return the loading seconds not overlapped by computing experts that are already loaded."""
        x, y = (np.array(column, np.float64) for column in zip(*self.compute, strict=True))
        beside = np.interp(np.asarray(rows, np.float64), x, y)
        return np.maximum(self.link_seconds(rows) - beside, 0.0)

    def for_sequences(self, count: int) -> "ExpertCosts":
        """Return these costs for passes with equally many rows of each of `count` sequences.

        Rows of one tree choose similar experts, rows of different texts do not: n rows of each sequence count
        as `count` * n^s rows that choose independently.
        """
        if count == 1 or self.spread == _BY_CHANCE:
            return self
        rows = np.array([1 << place for place in range(_BINS)], np.float64)
        alone = np.log(rows) * _by_rows(self.spread, rows)
        spread = (math.log(count) + alone) / np.log(count * rows)
        points = zip(rows.tolist(), spread.tolist(), strict=True)
        return replace(self, spread=tuple((int(count * n), exponent) for n, exponent in points))


def _by_rows(points: Points, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Interpolate in the logarithm of the rows; flat below the first point and above the last."""
    x, y = (np.array(column, np.float64) for column in zip(*points, strict=True))
    return np.asarray(np.interp(np.log2(np.maximum(rows, 1.0)), np.log2(x), y), np.float64)


@dataclass(frozen=True, slots=True)
class ExpertPass:
    """Requests for experts in one pass.

    Args:
        rows: Rows of the pass.
        layers: Number of layers with experts that ran.
        requested: Distinct experts requested, summed over these layers.
        missed: Requested experts that were not where they are computed.
        resident: Experts that were resident when the pass began.
    """

    rows: int
    layers: int
    requested: int
    missed: int
    resident: int

    @property
    def hit_rate(self) -> float:
        """Share of requested experts that were resident; 1 without requests."""
        return 1.0 - self.missed / self.requested if self.requested else 1.0


@dataclass(slots=True)
class Exponents:
    """Running means of an exponent's logarithm by rows, in bins around powers of two.

    weight: number of passes in each mean. Bins with little data are shrunk towards the others, all bins
    towards an exponent of 1 while data is scarce, and empty bins between two others are interpolated.
    """

    weight: _Weights = field(default_factory=lambda: [0.0] * _BINS)
    mean: _Means = field(default_factory=lambda: [0.0] * _BINS)

    def observe(self, rows: int, exponent: float) -> None:
        """Record the exponent observed in a pass of `rows` rows."""
        place = min(round(math.log2(rows)), _BINS - 1)
        value = math.log(min(max(exponent, _EXPONENTS[0]), _EXPONENTS[1]))
        kept = _KEEP * self.weight[place]
        self.weight[place] = kept + 1.0
        self.mean[place] += (value - self.mean[place]) / self.weight[place]

    def points(self) -> Points:
        """Return (rows, exponent), for `ExpertCosts`."""
        seen = sum(self.weight)
        usual = sum(w * m for w, m in zip(self.weight, self.mean, strict=True)) / (seen + _PRIOR)
        found = [
            (1 << place, math.exp((w * m + _PRIOR * usual) / (w + _PRIOR)))
            for place, (w, m) in enumerate(zip(self.weight, self.mean, strict=True))
            if w
        ]
        return tuple(found) or _BY_CHANCE


@dataclass(frozen=True, slots=True)
class _Saved:
    passes: Whole
    spread: Exponents
    reuse: Exponents


class ExpertUse:
    """Expert usage of a model, learned pass by pass.

    Args:
        count: Experts per layer.
        chosen: Experts chosen for each row.
    """

    def __init__(self, count: int, chosen: int) -> None:
        self.count, self.chosen = count, chosen
        self.passes = 0
        self._spread, self._reuse = Exponents(), Exponents()

    def observe(self, seen: ExpertPass) -> None:
        """Learn from a pass."""
        if not seen.requested:
            return
        self.passes += 1
        alone = math.log(1.0 - self.chosen / self.count) if self.chosen < self.count else 0.0
        asked = seen.requested / seen.layers
        if alone and seen.rows > 1 and self.chosen < asked < _FULL * self.count:
            rows = math.log(1.0 - asked / self.count) / alone
            self._spread.observe(seen.rows, math.log(rows) / math.log(seen.rows))
        held = seen.resident / (self.count * seen.layers)
        if _LEAST < held < 1.0 - _LEAST:
            hits = min(max(seen.hit_rate, _LEAST), 1.0 - _LEAST)
            self._reuse.observe(seen.rows, math.log(hits) / math.log(held))

    def applied(self, costs: ExpertCosts) -> ExpertCosts:
        """Return these costs with the learned exponents."""
        return replace(costs, spread=self._spread.points(), reuse=self._reuse.points())

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `restore` reads."""
        saved = {
            name: {
                "weight": [round(value, 3) for value in found.weight],
                "mean": [round(value, 4) for value in found.mean],
            }
            for name, found in (("spread", self._spread), ("reuse", self._reuse))
        }
        return {"passes": self.passes, **saved}

    def restore(self, value: object) -> None:
        """Restore the result of `to_json`. Raises ValueError, in one line, for anything else."""
        saved = read(value, _Saved)
        self.passes, self._spread, self._reuse = saved.passes, saved.spread, saved.reuse

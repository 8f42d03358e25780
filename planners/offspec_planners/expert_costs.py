"""What experts cost that are reached by need: how many a pass asks for, and how many of those must come.

If every row chose k of E experts by chance, n rows together would ask for U(n) = E (1 - (1 - k/E)^n) of
them, and a memory that holds the share f of all experts would hold the share f of those. Rows of a tree
choose alike, and some experts are chosen more often than others, so both have an exponent that is learnt
while a model runs, by rows: U is taken at n^s, and f^r of the experts asked for are resident.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import ArrayLike, NDArray

from offspec_planners.json_fields import Count, Number, Points, Whole, read

_BINS = 12  # of row counts: around 1, 2, 4 and so on
_KEEP = 0.98  # of what was seen at such row counts, from pass to pass
_PRIOR = 4.0  # passes that the assumption of independent choices counts for
_FULL = 0.98  # of a layer's experts: what asks for more says nothing of the exponent
_LEAST = 1e-3  # share of hits that counts as the least
_BY_CHANCE: Points = ((1, 1.0),)  # an exponent that was not learnt
_EXPONENTS = (1 / 16, 16.0)  # within which exponents are kept

Sources = Annotated[
    tuple[tuple[Annotated[float, Meta(ge=0, le=1)], Number], ...],
    Meta(min_length=1, description="a list of pairs [share, seconds], the shares from 0 to 1"),
]
_FARTHEST = 3.0  # that logarithms of those are from 0, rounded up
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
    """The routed experts of a model, all of one size.

    Args:
        count: Experts of a layer.
        chosen: Of them for each row.
        layers: Which layers have experts.
        nbytes: Bytes of one, as it is stored.
        weights: Weights of one.
        unpacked: Values of one that a pass makes of packed weights.
    """

    count: int
    chosen: int
    layers: tuple[int, ...]
    nbytes: int
    weights: int
    unpacked: float = 0.0

    @property
    def every(self) -> int:
        """Experts of all layers."""
        return self.count * len(self.layers)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the experts of one layer."""
        return self.count * self.nbytes

    def union(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Different experts of a layer that `rows` rows ask for, if they choose by chance."""
        return union(self.count, self.chosen, rows)


def union(count: int, chosen: int, rows: ArrayLike) -> NDArray[np.float64]:
    """E (1 - (1 - k/E)^n): different ones of E experts that n rows ask for, if each chooses k by chance."""
    return count * (1.0 - (1.0 - chosen / count) ** np.asarray(rows, np.float64))


@dataclass(frozen=True, slots=True)
class ExpertCosts:
    """Seconds in which experts come that a pass asks for and that are not where they are computed.

    Args:
        layers: That have experts.
        count: Experts of a layer.
        chosen: Of them for each row.
        sources: (share, seconds), the nearest first: experts beyond that share of all come through this
            link, one in so many seconds. Of several links the slowest is waited for.
        compute: (rows, seconds) of computing the experts of all layers, beside which others come.
        spread: (rows, exponent) of the rows, 1 where they choose independently.
        reuse: (rows, exponent) of the share that is resident, 1 where all are asked for equally often.
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
        """Whether any pass of the model is behind these."""
        return (self.spread, self.reuse) != (_BY_CHANCE, _BY_CHANCE)

    def union(self, rows: ArrayLike) -> NDArray[np.float64]:
        """Different experts of a layer that a pass of `rows` rows asks for."""
        n = np.asarray(rows, np.float64)
        return union(self.count, self.chosen, n ** _by_rows(self.spread, n))

    def hit_rate(self, rows: ArrayLike, source: int = 0) -> NDArray[np.float64]:
        """The share of those that need not come through a link, by default the nearest."""
        return np.asarray(self.sources[source][0] ** _by_rows(self.reuse, np.asarray(rows, np.float64)))

    def link_seconds(self, rows: ArrayLike, others: float = 0.0) -> NDArray[np.float64]:
        """Seconds in which the experts that a pass of `rows` rows misses come, over all layers.

        others: seconds in which other weights cross the nearest link. Default 0.
        """
        asked, slowest = self.layers * self.union(rows), np.full(np.shape(rows), others)
        for source, (_, seconds) in enumerate(self.sources):
            missed = asked * (1.0 - self.hit_rate(rows, source))
            slowest = np.maximum(slowest, missed * seconds + (0.0 if source else others))
        return slowest

    def wait_seconds(self, rows: ArrayLike) -> NDArray[np.float64]:
        """What is left of those seconds beside the computing of experts that have come, or were there."""
        x, y = (np.array(column, np.float64) for column in zip(*self.compute, strict=True))
        beside = np.interp(np.asarray(rows, np.float64), x, y)
        return np.maximum(self.link_seconds(rows) - beside, 0.0)

    def for_sequences(self, count: int) -> "ExpertCosts":
        """The same for passes whose rows are those of so many sequences, equally many of each.

        Rows of one tree choose alike, those of different texts do not: n of each of them stand for
        `count` * n^s rows that choose independently.
        """
        if count == 1 or self.spread == _BY_CHANCE:
            return self
        rows = np.array([1 << place for place in range(_BINS)], np.float64)
        alone = np.log(rows) * _by_rows(self.spread, rows)
        spread = (math.log(count) + alone) / np.log(count * rows)
        points = zip(rows.tolist(), spread.tolist(), strict=True)
        return replace(self, spread=tuple((int(count * n), exponent) for n, exponent in points))


def _by_rows(points: Points, rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Linear in the logarithm of the rows; flat below the first point and above the last."""
    x, y = (np.array(column, np.float64) for column in zip(*points, strict=True))
    return np.asarray(np.interp(np.log2(np.maximum(rows, 1.0)), np.log2(x), y), np.float64)


@dataclass(frozen=True, slots=True)
class ExpertPass:
    """What one pass asked of the experts.

    Args:
        rows: Of the pass.
        layers: With experts that ran.
        asked: Different experts that were asked for, added up over these layers.
        missed: Of those that were not where they are computed.
        held: Experts that were there when the pass began.
    """

    rows: int
    layers: int
    asked: int
    missed: int
    held: int

    @property
    def hit_rate(self) -> float:
        """The share of those asked for that were there; 1 where none was asked for."""
        return 1.0 - self.missed / self.asked if self.asked else 1.0


@dataclass(slots=True)
class Exponents:
    """Running means of an exponent's logarithm by rows, in bins around powers of two.

    weight: passes that each mean counts for. Bins that have seen little are taken to be like the others, all
    of them to be near an exponent of 1 before much was seen, and what lies between two to be between them.
    """

    weight: _Weights = field(default_factory=lambda: [0.0] * _BINS)
    mean: _Means = field(default_factory=lambda: [0.0] * _BINS)

    def observe(self, rows: int, exponent: float) -> None:
        """A pass of `rows` rows showed this exponent."""
        place = min(round(math.log2(rows)), _BINS - 1)
        value = math.log(min(max(exponent, _EXPONENTS[0]), _EXPONENTS[1]))
        kept = _KEEP * self.weight[place]
        self.weight[place] = kept + 1.0
        self.mean[place] += (value - self.mean[place]) / self.weight[place]

    def points(self) -> Points:
        """(rows, exponent), for `ExpertCosts`."""
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
    """What is learnt of how a model uses its experts, pass by pass.

    Args:
        count: Experts of a layer.
        chosen: Of them for each row.
    """

    def __init__(self, count: int, chosen: int) -> None:
        self.count, self.chosen = count, chosen
        self.passes = 0
        self._spread, self._reuse = Exponents(), Exponents()

    def observe(self, seen: ExpertPass) -> None:
        """Learn from a pass."""
        if not seen.asked:
            return
        self.passes += 1
        alone = math.log(1.0 - self.chosen / self.count) if self.chosen < self.count else 0.0
        asked = seen.asked / seen.layers
        if alone and seen.rows > 1 and self.chosen < asked < _FULL * self.count:
            rows = math.log(1.0 - asked / self.count) / alone
            self._spread.observe(seen.rows, math.log(rows) / math.log(seen.rows))
        held = seen.held / (self.count * seen.layers)
        if _LEAST < held < 1.0 - _LEAST:
            hits = min(max(seen.hit_rate, _LEAST), 1.0 - _LEAST)
            self._reuse.observe(seen.rows, math.log(hits) / math.log(held))

    def applied(self, costs: ExpertCosts) -> ExpertCosts:
        """These costs with what was learnt."""
        return replace(costs, spread=self._spread.points(), reuse=self._reuse.points())

    def to_json(self) -> dict[str, Any]:
        """The object that `from_json` reads."""
        saved = {
            name: {
                "weight": [round(value, 3) for value in found.weight],
                "mean": [round(value, 4) for value in found.mean],
            }
            for name, found in (("spread", self._spread), ("reuse", self._reuse))
        }
        return {"passes": self.passes, **saved}

    def restore(self, value: object) -> None:
        """Go on from what `to_json` gave. Raises ValueError, one line, for anything else."""
        saved = read(value, _Saved)
        self.passes, self._spread, self._reuse = saved.passes, saved.spread, saved.reuse

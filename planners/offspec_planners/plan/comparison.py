"""Predicted beside measured speed of a plan."""

import math
from dataclasses import dataclass
from statistics import median
from typing import Any

_FIGURES = ("seconds_per_pass", "tok_per_s", "tokens_per_pass")


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure as it was predicted and as it was measured."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """|predicted - measured| as a share of what was measured; infinite where that is nothing."""
        return abs(self.predicted - self.measured) / self.measured if self.measured > 0 else math.inf

    def to_json(self) -> dict[str, float]:
        return {"predicted": self.predicted, "measured": self.measured, "error": self.error}


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """One prompt."""

    prompt: str
    seconds_per_pass: Comparison
    tok_per_s: Comparison
    tokens_per_pass: Comparison

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, **{name: getattr(self, name).to_json() for name in _FIGURES}}


@dataclass(frozen=True, slots=True)
class Validation:
    """All prompts, at least one. The figures over all are medians, and their errors those of the medians."""

    rows: tuple[ValidationRow, ...]

    @property
    def seconds_per_pass(self) -> Comparison:
        return self._medians("seconds_per_pass")

    @property
    def tok_per_s(self) -> Comparison:
        return self._medians("tok_per_s")

    @property
    def tokens_per_pass(self) -> Comparison:
        return self._medians("tokens_per_pass")

    def to_json(self) -> dict[str, Any]:
        medians = {name: self._medians(name).to_json() for name in _FIGURES}
        return {**medians, "rows": [row.to_json() for row in self.rows]}

    def _medians(self, name: str) -> Comparison:
        figures: list[Comparison] = [getattr(row, name) for row in self.rows]
        return Comparison(median(f.predicted for f in figures), median(f.measured for f in figures))

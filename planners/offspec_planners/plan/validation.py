"""A plan held to its word: what was predicted beside what real passes took."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any


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
        return {
            "prompt": self.prompt,
            "seconds_per_pass": self.seconds_per_pass.to_json(),
            "tok_per_s": self.tok_per_s.to_json(),
            "tokens_per_pass": self.tokens_per_pass.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Validation:
    """All prompts, at least one. The figures over all are medians, and their errors those of the medians."""

    rows: tuple[ValidationRow, ...]

    @property
    def seconds_per_pass(self) -> Comparison:
        return self._medians(lambda row: row.seconds_per_pass)

    @property
    def tok_per_s(self) -> Comparison:
        return self._medians(lambda row: row.tok_per_s)

    @property
    def tokens_per_pass(self) -> Comparison:
        return self._medians(lambda row: row.tokens_per_pass)

    def to_json(self) -> dict[str, Any]:
        return {
            "seconds_per_pass": self.seconds_per_pass.to_json(),
            "tok_per_s": self.tok_per_s.to_json(),
            "tokens_per_pass": self.tokens_per_pass.to_json(),
            "rows": [row.to_json() for row in self.rows],
        }

    def _medians(self, figure: Callable[[ValidationRow], Comparison]) -> Comparison:
        figures = [figure(row) for row in self.rows]
        return Comparison(median(f.predicted for f in figures), median(f.measured for f in figures))

"""Forecast of a plan, the settings it was chosen from, possible changes, and comparison with measurements."""

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Annotated, Any

from offspec_planners.json_fields import Count, Number, Positive, Whole, one_of

_HALF = 0.5
_FIGURES = ("seconds_per_pass", "tok_per_s", "tokens_per_pass")


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected speed. All `_seconds` are per pass in steady state.

    ttft_s: seconds to the first token of a prompt of `prompt_tokens`. draft_seconds, compute_seconds: time of
    drafting and of the target's arithmetic; link_seconds: streaming time on the slowest link.
    bound: the bottleneck among these, "link", "compute" or "draft".
    """

    ttft_s: Number
    prompt_tokens: Count
    seconds_per_pass: Positive
    tokens_per_pass: Positive
    tok_per_s: Positive
    draft_seconds: Number
    compute_seconds: Number
    link_seconds: Number
    bound: Annotated[str, one_of("link", "compute", "draft")]


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the sweep: a budget and a width with their forecast."""

    budget: Count
    width: Count
    tok_per_s: Positive
    tokens_per_pass: Positive
    seconds_per_pass: Positive


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Another machine, format or draft, and its expected speed; None if it would not run."""

    change: str
    tok_per_s: Number | None
    note: str


@dataclass(frozen=True, slots=True)
class Shared:
    """Forecast of passes shared by several sequences, with their best budget.

    Args:
        sequences: Number of sequences.
        budget: Maximum total nodes of all their trees.
        tok_per_s: Total tokens per second.
        tokens_per_pass: Total tokens per pass.
        seconds_per_pass: Seconds per pass in steady state.
        link_seconds: Streaming seconds on the slowest link.
        caches: Total bytes of their KV caches and states.
    """

    sequences: Count
    budget: Count
    tok_per_s: Positive
    tokens_per_pass: Positive
    seconds_per_pass: Positive
    link_seconds: Number
    caches: Whole

    @property
    def each(self) -> float:
        """Tokens per second of one sequence."""
        return self.tok_per_s / self.sequences


def knee(rows: tuple[Shared, ...]) -> int | None:
    """Return the largest number of sequences up to which more add at least half their ideal gain.

    The ideal gain leaves the others at full speed. rows: ascending numbers of sequences. None: true for all.
    """
    for row, more in pairwise(rows):
        if more.tok_per_s < row.tok_per_s * (1 + _HALF * (more.sequences / row.sequences - 1)):
            return row.sequences
    return None


def best_by_budget(sweep: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """Return the best width for each budget of a sweep, budgets ascending."""
    best: dict[int, Choice] = {}
    for choice in sweep:
        if choice.budget not in best or choice.tok_per_s > best[choice.budget].tok_per_s:
            best[choice.budget] = choice
    return tuple(best[budget] for budget in sorted(best))


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured value of one figure."""

    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """|predicted - measured| as a share of the measured value; infinite if that is zero."""
        return abs(self.predicted - self.measured) / self.measured if self.measured > 0 else math.inf

    def to_json(self) -> dict[str, float]:
        return {"predicted": self.predicted, "measured": self.measured, "error": self.error}


@dataclass(frozen=True, slots=True)
class ValidationRow:
    """Comparison for one prompt."""

    prompt: str
    seconds_per_pass: Comparison
    tok_per_s: Comparison
    tokens_per_pass: Comparison

    def to_json(self) -> dict[str, Any]:
        return {"prompt": self.prompt, **{name: getattr(self, name).to_json() for name in _FIGURES}}


@dataclass(frozen=True, slots=True)
class Validation:
    """Comparison for all prompts, at least one; overall figures are medians, compared as such."""

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

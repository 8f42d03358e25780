"""Expected speed of a plan, the settings it was chosen from, what would change it, and what was measured."""

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
    """The speed that is expected. All `_seconds` are of one pass in steady state.

    ttft_s: seconds to the first token of a prompt of `prompt_tokens`. draft_seconds, compute_seconds: what
    the draft and the target's arithmetic take; link_seconds: what streaming takes at the slowest link.
    bound: which of these the others wait for, "link", "compute" or "draft".
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
    """One point of the sweep: what a budget and a width are expected to give."""

    budget: Count
    width: Count
    tok_per_s: Positive
    tokens_per_pass: Positive
    seconds_per_pass: Positive


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Another machine, format or draft, and the speed to expect of it; None where it would not run."""

    change: str
    tok_per_s: Number | None
    note: str


@dataclass(frozen=True, slots=True)
class Shared:
    """What passes that several sequences share are expected to give, with the budget that suits them best.

    Args:
        sequences: How many.
        budget: Most nodes of all their trees together.
        tok_per_s: Of all of them.
        tokens_per_pass: The same.
        seconds_per_pass: In steady state.
        link_seconds: What streaming takes of them at the slowest link.
        caches: Bytes of keys, values and states of all of them.
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
    """The most sequences up to which more still bring at least half of what they would at no cost to others.

    rows: With the numbers ascending. None: that goes for all of them.
    """
    for row, more in pairwise(rows):
        if more.tok_per_s < row.tok_per_s * (1 + _HALF * (more.sequences / row.sequences - 1)):
            return row.sequences
    return None


def best_by_budget(sweep: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """For each budget of a sweep the width that gives the most, budgets ascending."""
    best: dict[int, Choice] = {}
    for choice in sweep:
        if choice.budget not in best or choice.tok_per_s > best[choice.budget].tok_per_s:
            best[choice.budget] = choice
    return tuple(best[budget] for budget in sorted(best))


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

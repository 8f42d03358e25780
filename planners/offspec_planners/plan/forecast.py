"""What is expected of a plan: the speed, the settings it was chosen from, and what would change it."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from offspec_planners.json_fields import Count, Number, Positive, Whole, one_of

BOUNDS = ("link", "compute", "draft")
_HALF = 0.5


@dataclass(frozen=True, slots=True)
class Forecast:
    """The speed that is expected. All `_seconds` are of one pass in steady state.

    ttft_s: seconds to the first token of a prompt of `prompt_tokens`. draft_seconds, compute_seconds: what
    the draft and the target's arithmetic take; link_seconds: what streaming takes at the slowest link.
    bound: which of these the others wait for, one of `BOUNDS`.
    """

    ttft_s: Number
    prompt_tokens: Count
    seconds_per_pass: Positive
    tokens_per_pass: Positive
    tok_per_s: Positive
    draft_seconds: Number
    compute_seconds: Number
    link_seconds: Number
    bound: Annotated[str, one_of(*BOUNDS)]


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

"""What is expected of a plan: the speed, the settings it was chosen from, and what would change it."""

from dataclasses import dataclass

from offspec_planners.json_fields import Fields

BOUNDS = ("link", "compute", "draft")


@dataclass(frozen=True, slots=True)
class Forecast:
    """The speed that is expected. All `_seconds` are of one pass in steady state.

    ttft_s: seconds to the first token of a prompt of `prompt_tokens`. draft_seconds, compute_seconds: what
    the draft and the target's arithmetic take; link_seconds: what streaming takes at the slowest link.
    bound: which of these the others wait for, one of `BOUNDS`.
    """

    ttft_s: float
    prompt_tokens: int
    seconds_per_pass: float
    tokens_per_pass: float
    tok_per_s: float
    draft_seconds: float
    compute_seconds: float
    link_seconds: float
    bound: str

    @classmethod
    def read(cls, fields: Fields) -> "Forecast":
        """From the object of a plan file. Raises ValueError."""
        found = cls(
            ttft_s=fields.number("ttft_s"),
            prompt_tokens=fields.whole("prompt_tokens", low=1),
            seconds_per_pass=fields.number("seconds_per_pass", above_zero=True),
            tokens_per_pass=fields.number("tokens_per_pass", above_zero=True),
            tok_per_s=fields.number("tok_per_s", above_zero=True),
            draft_seconds=fields.number("draft_seconds"),
            compute_seconds=fields.number("compute_seconds"),
            link_seconds=fields.number("link_seconds"),
            bound=fields.choice("bound", BOUNDS),
        )
        fields.done()
        return found


@dataclass(frozen=True, slots=True)
class Choice:
    """One point of the sweep: what a budget and a width are expected to give."""

    budget: int
    width: int
    tok_per_s: float
    tokens_per_pass: float
    seconds_per_pass: float

    @classmethod
    def read(cls, fields: Fields) -> "Choice":
        """From the object of a plan file. Raises ValueError."""
        found = cls(
            budget=fields.whole("budget", low=1),
            width=fields.whole("width", low=1),
            tok_per_s=fields.number("tok_per_s", above_zero=True),
            tokens_per_pass=fields.number("tokens_per_pass", above_zero=True),
            seconds_per_pass=fields.number("seconds_per_pass", above_zero=True),
        )
        fields.done()
        return found


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Another machine, format or draft, and the speed to expect of it; None where it would not run."""

    change: str
    tok_per_s: float | None
    note: str

    @classmethod
    def read(cls, fields: Fields) -> "WhatIf":
        """From the object of a plan file. Raises ValueError."""
        found = cls(fields.text("change"), fields.number_or_none("tok_per_s"), fields.text("note"))
        fields.done()
        return found


def best_by_budget(sweep: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """For each budget of a sweep the width that gives the most, budgets ascending."""
    best: dict[int, Choice] = {}
    for choice in sweep:
        if choice.budget not in best or choice.tok_per_s > best[choice.budget].tok_per_s:
            best[choice.budget] = choice
    return tuple(best[budget] for budget in sorted(best))

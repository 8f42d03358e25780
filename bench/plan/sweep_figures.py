"""The figures of the sweep: a cell for each pair of budget and width, what is best, and how it is told."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.lib.report import Report, grid, ratio

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

Pair = tuple[int, int]  # budget, width
_TOP = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """The timed beginning of an answer. pair: budget and width, or None for the plan's own way."""

    turn: int
    pair: Pair | None
    tokens: int
    passes: int
    seconds: float

    @property
    def tok_per_s(self) -> float:
        return ratio(self.tokens, self.seconds)


def summarise(answers: Sequence[Answer]) -> dict[str, Any]:
    """Cells, the plan's own speed, and its share of the best.

    Only pairs that were in every round can be the best. The best of many noisy figures is too high, so the
    share of the mean of the best three stands beside it. noise: how far answers of the plan's own way in one
    round lie apart, as a share of their mean; the median over rounds.
    """
    pairs = sorted({answer.pair for answer in answers if answer.pair is not None})
    cells = [_cell(pair, [a for a in answers if a.pair == pair]) for pair in pairs]
    rounds = len({answer.turn for answer in answers})
    whole = [cell for cell in cells if cell["rounds"] == rounds]
    ranked = sorted(whole, key=lambda cell: -cell["tok_per_s"])
    own = [answer for answer in answers if answer.pair is None]
    chosen = _figures(own)
    top = statistics.mean(cell["tok_per_s"] for cell in ranked[:_TOP])
    return {
        "rounds": rounds,
        "chosen": chosen,
        "best": ranked[0],
        "of_best": ratio(chosen["tok_per_s"], ranked[0]["tok_per_s"]),
        "of_top_three": ratio(chosen["tok_per_s"], top),
        "noise": statistics.median(_apart(own, turn) for turn in {answer.turn for answer in own}),
        "cells": cells,
    }


def _cell(pair: Pair, answers: Sequence[Answer]) -> dict[str, Any]:
    budget, width = pair
    return {"budget": budget, "width": width, **_figures(answers)}


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    tokens, passes, seconds = (_sum(answers, key) for key in ("tokens", "passes", "seconds"))
    return {
        "rounds": len({answer.turn for answer in answers}),
        "tok_per_s": ratio(tokens, seconds),
        "tokens_per_pass": ratio(tokens, passes),
        "seconds_per_pass": ratio(seconds, passes),
    }


def _sum(answers: Iterable[Answer], key: str) -> float:
    return float(sum(getattr(answer, key) for answer in answers))


def _apart(answers: Sequence[Answer], turn: int) -> float:
    rates = [answer.tok_per_s for answer in answers if answer.turn == turn]
    return ratio(max(rates) - min(rates), statistics.mean(rates))


def show_ceiling(plan: Plan, report: Report) -> None:
    """What the plan chose, and what its passes cost without a draft."""
    for rows in sorted({1, plan.budget, 1024}):
        seconds = float(plan.costs.iteration(0.0, rows))
        report.ceiling(f"{seconds:.3g} s a pass of {rows} tokens, by what was measured for the plan")
    report.note(
        f"the plan: budget {plan.budget}, width {plan.width}, {plan.forecast.tok_per_s:.3g} tok/s foreseen, "
        f"acceptance {plan.acceptance}"
    )


def show(case: dict[str, Any], report: Report) -> None:
    """Tokens a second by budget and width; pairs that later rounds left out are in brackets."""
    cells = {(cell["budget"], cell["width"]): cell for cell in case["cells"]}
    widths = sorted({width for _, width in cells})
    title = f"{case['case']}: tok/s by budget and width, {case['rounds']} prompts"
    view = grid(title, "budget", *map(str, widths))
    for budget in sorted({budget for budget, _ in cells}):
        view.add_row(str(budget), *(_told(cells.get((budget, width)), case["rounds"]) for width in widths))
    report.out.print(view)
    chosen, best = case["chosen"], case["best"]
    report.reached(
        f"{chosen['tok_per_s']:.3g} tok/s by the plan ({chosen['tokens_per_pass']:.3g} tokens in "
        f"{chosen['seconds_per_pass']:.3g} s), {best['tok_per_s']:.3g} by the best pair, budget "
        f"{best['budget']} and width {best['width']}",
        case["of_best"],
    )
    report.reached("of the mean of the best three pairs", case["of_top_three"])
    report.note(f"answers of the plan's own way to one prompt lie {case['noise']:.0%} apart")


def _told(cell: dict[str, Any] | None, rounds: int) -> str:
    if cell is None:
        return ""
    text = f"{cell['tok_per_s']:.3g}"
    return text if cell["rounds"] == rounds else f"({text})"

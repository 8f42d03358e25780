"""Pure arithmetic of the sweep: answers into a cell for each pair of budget and width, and what is best."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.report import ratio

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

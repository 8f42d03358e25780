"""A target of Llama 70B's shape in NF4 with a draft of 1B's shape, within the memory of smaller cards.

Weights are random, so a pass accepts next to nothing. Times are real; tokens per second are computed from
them and the tokens per pass that the plan predicts.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from bench.gpu_day.answers import ask, engine_of, least_vram, short, tried
from bench.gpu_day.day import Day
from bench.gpu_day.models import DRAFT, write_nf4
from bench.gpu_day.paced import paced
from bench.lib import random_model

_CASES = (("24GB", 25.0), ("12GB", 25.0), ("8GB", 12.0))


def measure(day: Day) -> None:
    tiny = random_model.SHAPES["tiny"]
    shape = replace(tiny, layers=8) if day.dry else random_model.SHAPES["70b"]
    began = time.perf_counter()
    target = write_nf4(shape, day.models / "large")
    draft = random_model.build(replace(tiny, layers=2) if day.dry else DRAFT, day.models / "draft-1b")
    day.found["write_seconds"] = time.perf_counter() - began
    for vram, rate in (("tight", 1.0),) if day.dry else _CASES:
        name, row = f"70B nf4 {vram} {rate:g} GB/s", dict[str, Any]()
        day.found[name] = row
        with paced(rate * 1e9):
            try:
                _passes(day, row, vram, target=str(target), draft=str(draft))
            except Exception as error:
                tried(day, name, row, error)
        day.found["short"] = short(day.found)
        day.save()


def _passes(day: Day, row: dict[str, Any], vram: str, target: str, draft: str) -> None:
    """Passes as the plan has them, of a prompt of 300 tokens; then the plan's speed by the measured pass."""
    load: dict[str, Any] = {
        "model": target,
        "draft": draft,
        "device": "cuda",
        "context": 600 if day.dry else 2048,
    }
    load |= {"vram": least_vram(**load)} if day.dry else {"vram": vram, "memory": "62GB"}
    with engine_of(row, **load) as engine:
        row["answers"] = [ask(engine, list(range(5, 100 if day.dry else 300)), 4 if day.dry else 6)]
        if "forecast" in row:
            made, told = row["answers"][0], row["forecast"]
            seconds = made["pass_target_seconds"] + made["pass_draft_seconds"]
            row["pass_of_forecast"] = seconds / told["seconds_per_pass"]
            row["tok_per_s_at_forecast_acceptance"] = told["tokens_per_pass"] / seconds

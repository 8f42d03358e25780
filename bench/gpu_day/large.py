"""A target with Llama 70B's shape in NF4 and a draft with 1B's shape, within the memory of smaller cards.

Weights are random, so almost no draft token is accepted. Times are real; tokens per second are computed from
them and the plan's predicted tokens per pass.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from bench.gpu_day.answers import ask, engine_of, least_vram, short, tried
from bench.gpu_day.models import DRAFT, write_nf4
from bench.gpu_day.step_context import StepContext
from bench.gpu_day.throttled_link import throttled
from bench.lib import random_model

_CASES = (("24GB", 25.0), ("12GB", 25.0), ("8GB", 12.0))


def measure(context: StepContext) -> None:
    tiny = random_model.SHAPES["tiny"]
    shape = replace(tiny, layers=8) if context.dry else random_model.SHAPES["70b"]
    began = time.perf_counter()
    target = write_nf4(shape, context.models / "large")
    draft = random_model.build(replace(tiny, layers=2) if context.dry else DRAFT, context.models / "draft-1b")
    context.found["write_seconds"] = time.perf_counter() - began
    for vram, rate in (("tight", 1.0),) if context.dry else _CASES:
        name, row = f"70B nf4 {vram} {rate:g} GB/s", dict[str, Any]()
        context.found[name] = row
        with throttled(rate * 1e9):
            try:
                _passes(context, row, vram, target=str(target), draft=str(draft))
            except Exception as error:
                tried(context, name, row, error)
        context.found["short"] = short(context.found)
        context.save()


def _passes(context: StepContext, row: dict[str, Any], vram: str, target: str, draft: str) -> None:
    """Run planned passes of a prompt of 300 tokens; compute the plan's speed with the measured pass."""
    load: dict[str, Any] = {
        "model": target,
        "draft": draft,
        "device": "cuda",
        "context": 600 if context.dry else 2048,
    }
    load |= {"vram": least_vram(**load)} if context.dry else {"vram": vram, "memory": "62GB"}
    with engine_of(row, **load) as engine:
        row["answers"] = [ask(engine, list(range(5, 100 if context.dry else 300)), 4 if context.dry else 6)]
        if "forecast" in row:
            made, forecast = row["answers"][0], row["forecast"]
            seconds = made["pass_target_seconds"] + made["pass_draft_seconds"]
            row["pass_of_forecast"] = seconds / forecast["seconds_per_pass"]
            row["tok_per_s_at_forecast_acceptance"] = forecast["tokens_per_pass"] / seconds

"""Answers of an engine, with the figures of every pass and the plan's forecast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

from bench.gpu_day.profiling import Compiled, Stages
from bench.gpu_day.step_context import StepContext
from bench.lib.worker import answer

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short list of five fruits with a remark about each.",
    "Rewrite this text word for word: The quick brown fox jumps over the lazy dog.",
)
_KEPT_PASSES = 16  # passes per answer in the record


@contextmanager
def engine_of(row: dict[str, Any], *, replan: bool = True, **load: Any) -> Iterator[Any]:
    """Yield an engine, replanned by default. Load time, placement and forecast are added to `row`."""
    import offspec

    stages, compiled, began = Stages(), Compiled().install(), time.perf_counter()
    row |= {"notices": stages.notices, "stages": stages.seconds, "compiled": compiled.to_json()}
    with offspec.load(**load, replan=replan, notify=stages) as engine:
        stages.end()
        row |= {"load_seconds": time.perf_counter() - began, "placement": engine.placement}
        row["compiled"] = compiled.to_json()
        if engine.plan is not None:
            plan = engine.plan
            row["forecast"] = {**asdict(plan.forecast), "budget": plan.budget, "width": plan.width}
            row["costs"] = asdict(plan.costs)
        yield engine


def least_vram(**load: Any) -> int:
    """Return the minimum device memory that a model accepts, in bytes, so that a dry run streams too."""
    import offspec

    try:
        offspec.load(**load, vram="895MB").close()
    except offspec.CapacityError as error:
        return error.needed
    raise AssertionError("one byte of device memory was accepted")


def ask(
    engine: Any, prompt: Any, tokens: int, *, check: bool = False, temperature: float = 0.0
) -> dict[str, Any]:
    """Return one answer: its ids, speed, bytes, and passes. check: decode it again without speculation."""
    import offspec

    params = offspec.SamplingParams(max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True)
    result, passes = answer(engine, prompt, params, check=check)
    return {
        "ids": list(result.token_ids),
        "text": result.text[:200],
        "tok_per_s": result.tok_per_s,
        "tokens_per_pass": result.tokens_per_pass,
        "seconds": result.seconds,
        "ttft_seconds": result.ttft_s,
        "bytes_streamed": result.bytes_streamed,
        "peak_device_bytes": result.peak_device_bytes,
        "mismatches": None if result.mismatches is None else [asdict(found) for found in result.mismatches],
        **steady_medians(passes),
        "passes": passes[:_KEPT_PASSES],
    }


def steady_medians(passes: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over all passes except the first (has the prompt) and the last (has a smaller tree)."""
    some = passes[1:-1] or passes
    if not some:
        return {}
    names = ("target_seconds", "draft_seconds", "wait_seconds", "emitted", "tree_nodes", "bytes_streamed")
    return {f"pass_{name}": median(each[name] for each in some) for name in names} | {
        "steady_tok_per_s": sum(each["emitted"] for each in some)
        / max(sum(each["target_seconds"] + each["draft_seconds"] for each in some), 1e-9)
    }


def short(found: dict[str, Any]) -> str:
    """Return the speeds of all cases in one line."""
    parts = []
    for name, row in found.items():
        if isinstance(row, dict) and "answers" in row:
            speeds = ", ".join(f"{each['steady_tok_per_s']:.1f}" for each in row["answers"])
            parts.append(f"{name}: {speeds}")
        elif isinstance(row, dict) and "error" in row:
            parts.append(f"{name}: failed")
    return "; ".join(parts)


def tried(context: StepContext, name: str, row: dict[str, Any], error: Exception) -> None:
    """Record that a case failed, and continue with the next."""
    import traceback

    traceback.print_exc()
    row["error"] = f"{type(error).__name__}: {error}"[:800]
    context.found["error"] = f"{name}: {row['error']}"

"""Measured process that answers prompts; it runs inside the memory cgroup and prints JSON.

The measuring process itself holds neither torch nor a model: pages that it maps first are charged to its own
group, and the worker would appear smaller than it is.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bench.lib.command import printed_job
from bench.lib.process import log_notice, log_progress
from bench.peers.worker import process_peak, read_bytes

if TYPE_CHECKING:
    from offspec import Engine
    from offspec.core.config import SamplingParams
    from offspec.core.events import Result


def answer(
    engine: Engine, prompt: Any, params: SamplingParams, **options: Any
) -> tuple[Result, list[dict[str, Any]]]:
    """Return one answer and the figures of its passes. options: of `Engine.stream`."""
    from offspec.core.events import Finished, Notice, PassStats

    passes, result = list[dict[str, Any]](), None
    for event in engine.stream(prompt, params, **options):
        if isinstance(event, PassStats):
            passes.append(asdict(event))
        elif isinstance(event, Notice):
            log_notice(event)
        elif isinstance(event, Finished):
            result = event.result
    assert result is not None, "a stream ends with Finished"
    return result, passes


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine, answer the job's prompts, and return the figures of each answer and of the process.

    job: `load` (arguments of `offspec.load`), `params` (of SamplingParams, without the seed), `seed`,
    `prompts` (number, id, text), and `speculate` (of `Engine.stream`).
    """
    import offspec
    from offspec.core.config import SamplingParams

    start = time.perf_counter()
    answers = []
    with offspec.load(**job["load"], notify=log_notice) as engine:
        load_seconds, load_reads = time.perf_counter() - start, read_bytes()
        for prompt in job["prompts"]:
            params = SamplingParams(**job["params"], seed=job["seed"] + prompt["number"])
            reads = read_bytes()
            result, passes = answer(engine, prompt["text"], params, speculate=job["speculate"])
            figures = {**result.to_json(), "per_pass": passes, "read_bytes": read_bytes() - reads}
            answers.append({"id": prompt["id"], **figures})
            line = f"{result.tokens} tokens, {result.passes} passes, {result.seconds:.1f} s"
            log_progress(f"  {prompt['id']:<12} {line}")
    return {
        "load_seconds": load_seconds,
        "load_read_bytes": load_reads,
        "process_peak_bytes": process_peak(),
        "answers": answers,
    }


if __name__ == "__main__":
    sys.exit(printed_job(work))

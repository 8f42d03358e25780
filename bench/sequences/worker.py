"""The measured process of `bench.sequences`: so many answers at a time, and the figures of the whole.

It is kept apart as `bench.lib.worker` is.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Any

from bench.lib.command import printed_job
from bench.lib.process import say
from bench.peers.worker import process_peak, read_bytes
from bench.sequences.passes import by_kind, shared_passes


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine, have it answer all prompts, and return the figures.

    job: as `bench.lib.streamed.ask` makes it; `load` says how many answers share passes.
    """
    import offspec
    from offspec.core.config import SamplingParams
    from offspec.core.events import Finished, PassStats

    began = time.perf_counter()
    with offspec.load(**{"device": "cpu", **job["load"]}, sequences=job["sequences"], replan=True) as engine:
        load_seconds, target = time.perf_counter() - began, engine._assembly.target
        head = target.head_stored_bytes if engine.placement["head"] == "disk" else 0
        reads, streamed = read_bytes(), target.bytes_streamed
        began, passes, results = time.perf_counter(), list[PassStats](), []
        answers = [
            engine.submit(
                prompt["text"],
                SamplingParams(**job["params"], seed=job["seed"] + prompt["number"]),
                speculate=job["speculate"],
            )
            for prompt in job["prompts"]
        ]
        for answer in answers:
            for event in answer:
                if isinstance(event, PassStats):
                    passes.append(event)
                elif isinstance(event, Finished):
                    results.append(event.result)
        seconds, tokens = time.perf_counter() - began, sum(result.tokens for result in results)
        say(f"  {len(results)} answers, {tokens} tokens, {seconds:.1f} s")
        return {
            "predicted": asdict(engine.plan.forecast) if engine.plan else None,
            "passes_by_kind": by_kind(shared_passes(passes, job["sequences"])),
            "load_seconds": load_seconds,
            "seconds": seconds,
            "tokens": tokens,
            "nodes": sum(stats.tree_nodes for stats in passes),
            "passes": sum(result.passes for result in results),
            "prompt_tokens": sum(result.prompt_tokens for result in results),
            "ttft_s": [result.ttft_s for result in results],
            "token_ids": [result.token_ids for result in results],
            "read_bytes": read_bytes() - reads,
            "streamed_bytes": target.bytes_streamed - streamed,
            "trip_bytes": engine.placement["disk_bytes"] + head,
            "budget": engine.budget,
            "width": engine.width,
            "sequences": engine.sequences,
            "process_peak_bytes": process_peak(),
        }


if __name__ == "__main__":
    sys.exit(printed_job(work))

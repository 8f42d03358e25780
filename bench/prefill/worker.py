"""The measured process of the prefill bench: it runs inside the memory cgroup and prints JSON."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.lib.command import printed_job
from offspec_planners.measure import RawDisk

_SETTLE_SECONDS = 2.0  # in which the ring fills: it holds a few layers


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine and time its prompts; every reading of the disk is taken while its ring is full."""
    import offspec
    from offspec.core import memory

    threads, block = job["raw_shape"]
    raw = RawDisk([Path(file) for file in job["files"]], job["raw_bytes"], (threads, block))
    chosen, runs = random.Random(0), []
    with offspec.load(**{"device": "cpu", **job["load"]}) as engine:
        vocabulary = json.loads((Path(job["load"]["model"]) / "config.json").read_text())["vocab_size"]
        _first_token(engine, [1, 2, 3])  # the ring reads nothing before; lazy parts of torch are loaded
        for _ in range(job["repeats"]):
            for tokens in job["tokens"]:
                before = _settled(raw)
                figures = _first_token(engine, [chosen.randrange(vocabulary) for _ in range(tokens)])
                runs.append({"tokens": tokens, "raw_before": before, **figures, "raw_after": _settled(raw)})
                print(f"  {tokens} tokens: {figures['seconds']:.2f} s", file=sys.stderr, flush=True)
        return {
            "placement": engine.placement,
            "draft": engine.draft,
            "raw": {"direct": raw.direct, "threads": raw.threads, "block": raw.block},
            "runs": runs,
            "process_peak_bytes": memory.peak_bytes(),
        }


def _settled(raw: RawDisk) -> float:
    """Bytes per second of the disk, once the ring has read ahead all it can."""
    time.sleep(_SETTLE_SECONDS)
    return raw.read()


def _first_token(engine: Any, prompt: list[int]) -> dict[str, Any]:
    """Seconds to the end of the first pass, the draft's part of it, and the bytes that came meanwhile."""
    from offspec.core.config import SamplingParams
    from offspec.core.events import PassStats

    start = time.perf_counter()
    # With a draft the first pass checks a tree as well, if there may be more tokens than one.
    events = engine.stream(prompt, SamplingParams(max_tokens=1 if engine.draft == "none" else 32))
    try:
        for event in events:
            if isinstance(event, PassStats):
                return {
                    "seconds": time.perf_counter() - start,
                    "draft_seconds": event.draft_seconds,
                    "target_seconds": event.target_seconds,
                    "tree_nodes": event.tree_nodes,
                    "bytes": event.bytes_streamed,
                }
    finally:
        events.close()
    raise AssertionError("an answer has a pass")


if __name__ == "__main__":
    sys.exit(printed_job(work))

"""The measured process of the offload bench: it runs inside the memory cgroup and prints JSON.

It is kept apart so that the process that measures holds neither torch nor a model: pages that it mapped
would be charged to its own group, and the worker would look smaller than it is.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Load the engine, answer the job's prompts, and return the figures of each and of the process.

    job: `load` (arguments of `offspec.load`), `params` (of SamplingParams, less the seed), `seed`,
    `prompts` (number, id, text), `speculate`, and `check` (of `Engine.stream`).
    """
    import offspec
    from offspec.config import SamplingParams
    from offspec.events import Finished, Notice, PassStats

    start = time.perf_counter()
    answers = []
    with offspec.load(**job["load"], notify=_notify) as engine:
        load_seconds = time.perf_counter() - start
        for prompt in job["prompts"]:
            params = SamplingParams(**job["params"], seed=job["seed"] + prompt["number"])
            passes: list[PassStats] = []
            result = None
            for event in engine.stream(
                prompt["text"], params, speculate=job["speculate"], check=job["check"]
            ):
                if isinstance(event, PassStats):
                    passes.append(event)
                elif isinstance(event, Notice):
                    _notify(event)
                elif isinstance(event, Finished):
                    result = event.result
            assert result is not None, "a stream ends with Finished"
            answers.append({"id": prompt["id"], **result.to_json(), "per_pass": [asdict(p) for p in passes]})
            _say(f"{prompt['id']:<12} {result.tokens} tokens, {result.passes} passes, {result.seconds:.1f} s")
    return {"load_seconds": load_seconds, "process_peak_bytes": process_peak(), "answers": answers}


def process_peak() -> int:
    """The most resident memory this process has had, in bytes; file pages it maps are counted."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def _notify(event: Any) -> None:
    text = getattr(event, "text", None)
    if text:
        _say(f"notice: {text}")


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def main(job: str) -> int:
    """Run a job given as JSON; its figures are the last line of stdout."""
    from offspec.errors import OffspecError

    try:
        figures = work(json.loads(job))
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(json.dumps(figures), flush=True)
    return 0

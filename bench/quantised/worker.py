"""The measured process of windows of passes in the quantised bench: it runs inside the memory cgroup.

It loads a target without a draft, as `bench.stream` does, and reads the link right before and after each
window of passes. What the processor can do is measured elsewhere, since that takes memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.lib.command import printed_job
from bench.stream.floor import Compute
from bench.stream.window import Passes, Window, run_window


def work(job: dict[str, Any]) -> dict[str, Any]:
    """job: `model` (a folder), `memory` (bytes), `dtype`, `tokens` (of passes), `seconds` (of a window),
    `raw_bytes` (of a reading of the link)."""
    from bench.stream.target import describe, load, streamed_files
    from offspec.core import memory
    from offspec_planners.measure import RawDisk

    asked = argparse.Namespace(
        tokens=job["tokens"], resident=None, memory=job["memory"], device="cpu", dtype=job["dtype"]
    )
    target, placement = load(asked, Path(job["model"]), None)
    try:
        passes = Passes(target, head=str(placement.head) != "device")
        passes.run(max(job["tokens"]))
        passes.settle()
        peak = memory.peak_bytes()
        raw = RawDisk(streamed_files(target, placement), job["raw_bytes"])
        windows = [
            run_window(passes, tokens, job["seconds"], raw.read, lambda tokens: Compute(0.0, 0.0, 0.0))
            for tokens in job["tokens"]
        ]
        where = describe(target, placement)
    finally:
        target.close()
    return {
        "placement": where,
        "direct": raw.direct,
        "process_peak_bytes": peak,
        "windows": [figures(window) for window in windows],
    }


def figures(window: Window) -> dict[str, Any]:
    """Of one pass of a window."""
    return {
        "tokens": window.tokens,
        "passes": window.passes,
        "seconds": window.seconds / window.passes,
        "bytes": window.nbytes / window.passes,
        "waited_seconds": window.waited / window.passes,
        "link_bytes_per_s": window.link,
        "link_seconds": window.link_seconds / window.passes,
    }


if __name__ == "__main__":
    sys.exit(printed_job(work))

"""Time spent in the stages of a load, in compiling Triton kernels, and in kernels on the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any


class Stages:
    """Seconds of each stage of a load, measured from its events."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.notices: list[str] = []
        self._stage, self._began = "begin", time.perf_counter()

    def __call__(self, event: Any) -> None:
        stage = getattr(event, "stage", None)
        if stage is not None and stage != self._stage:
            self.end(stage)
        text = getattr(event, "text", None)
        if text and hasattr(event, "urgent"):
            self.notices.append(text)

    def end(self, following: str = "end") -> None:
        """End the current stage."""
        now = time.perf_counter()
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + now - self._began
        self._stage, self._began = following, now


def device_kernels(work: Callable[[], object]) -> dict[str, Any]:
    """Return seconds and launches of kernels and copies during `work`, longest first, and its duration."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available() or torch.version.cuda is None:
        work()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    return {"seconds": seconds, **_summed(watched.profiler.kineto_results.events())}


def _summed(events: Iterable[Any]) -> dict[str, Any]:
    """Return counts and seconds by name, longest first. torch's averages take a minute for a few passes."""
    found: dict[str, list[Any]] = {}
    for event in events:
        if event.device_type().name != "CPU":
            row = found.setdefault(event.name()[:90], [0, 0.0])
            row[0] += 1
            row[1] += event.duration_ns() / 1e9
    rows = sorted(found.items(), key=lambda item: -item[1][1])
    return {
        "busy_seconds": sum(seconds for _, (_, seconds) in rows),
        "launches": sum(count for _, (count, _) in rows),
        "kernels": dict(rows[:30]),
    }


class Compiled:
    """Counts and seconds of Triton kernels compiled without a cache hit, by name."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}

    def install(self) -> Compiled:
        import triton

        triton.knobs.compilation.listener = self.add
        return self

    def add(self, *, src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            row = self.found.setdefault(getattr(src, "name", None) or str(src.fn), [0, 0.0])
            row[0] += 1
            row[1] += times.total / 1e6

    def to_json(self) -> dict[str, Any]:
        """Return the kernels, longest first."""
        rows = sorted(self.found.items(), key=lambda item: -item[1][1])
        total = sum(seconds for _, (_, seconds) in rows)
        return {"seconds": round(total, 2), "kernels": {name: [int(n), round(s, 2)] for name, (n, s) in rows}}

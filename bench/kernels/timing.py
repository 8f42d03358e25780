"""Timing of calls, peak scratch memory, and the device's limits.

On a CUDA device time is measured between two events, with the second-level cache emptied before each run.
Emptying takes a while, in which the host launches the call, so the measured time is the work and not the
launch, which is measured separately. On a CPU wall time is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.lib.cgroup import BenchError
from offspec.model.devices import find_device
from offspec_kernels.backend import is_interpreted
from offspec_planners.measure.processor import gemm_rates, memory_bandwidth

Call = Callable[[], Any]

# Sides of the square matrices whose product is the ceiling, and bytes of the copy.
_SIDE = {"cpu": 2048, "cuda": 8192}
_PRODUCT_ROWS = {"cpu": (256, 1024), "cuda": (4096, 8192)}
_COPIED = {"cpu": 128 << 20, "cuda": 1 << 30}
_FLUSHED = 512 << 20  # bytes written before a run: more than any cache, and at least 0.15 ms of work
_TURNS = 5  # number of alternations between the ways of a case
_MOST_RUNS = 100  # per turn


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call. asking: time of the host to launch it, if separate."""

    seconds: float
    least: float
    most: float
    runs: int
    asking: float | None = None

    def to_json(self) -> dict[str, Any]:
        asked = {} if self.asking is None else {"asking_seconds": self.asking}
        return {"seconds": self.seconds, "spread": [self.least, self.most], "runs": self.runs, **asked}


Clock = Callable[[Call], tuple[float, float | None]]  # seconds of a call, and of its launch if separate


def wall_clock(call: Call) -> tuple[float, None]:
    """Time a call on a CPU, which is synchronous."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start, None


def event_clock(device: torch.device) -> Clock:
    """Return a clock for a CUDA device."""
    flushed = torch.empty(_FLUSHED, dtype=torch.uint8, device=device)

    def clock(call: Call) -> tuple[float, float]:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        flushed.zero_()
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        asking = time.perf_counter() - start
        end.synchronize()
        return begin.elapsed_time(end) / 1000, asking

    return clock


def find_timed_device(name: str) -> torch.device:
    """Return a device by its name. Raises OffspecError, also if its kernels would be interpreted."""
    device = find_device(name)
    if device.type == "cuda" and is_interpreted():
        raise BenchError("TRITON_INTERPRET is set, and interpreted kernels cannot be timed: unset it")
    return device


def device_name(device: torch.device) -> str:
    """Return a device's name for records."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def variant_of(device: torch.device) -> str:
    """Return the suffix of a record's name."""
    return "" if device.type == "cpu" else f"-{device.type}"


def clock_of(device: torch.device) -> Clock:
    return event_clock(device) if device.type == "cuda" else wall_clock


def time_in_turns(ways: Mapping[str, Call], clock: Clock, seconds: float) -> dict[str, Timing]:
    """Return the median of many runs of each way, after an uncounted one.

    The ways take turns, so that drift of the machine affects all alike; a turn lasts about `seconds`.
    """
    found: dict[str, list[tuple[float, float | None]]] = {name: [] for name in ways}
    for turn in range(_TURNS):
        for name, call in ways.items():
            if not turn:
                call()
            start, runs = time.perf_counter(), 0
            while not runs or (time.perf_counter() - start < seconds and runs < _MOST_RUNS):
                found[name].append(clock(call))
                runs += 1
    return {name: _timing(runs) for name, runs in found.items()}


def _timing(runs: Sequence[tuple[float, float | None]]) -> Timing:
    spent = [run for run, _ in runs]
    asked = [asking for _, asking in runs if asking is not None]
    return Timing(median(spent), min(spent), max(spent), len(spent), median(asked) if asked else None)


def peak_scratch(call: Call, device: torch.device) -> int:
    """Return the peak bytes that a call allocates, beyond those that remain (its result included).

    Only torch's allocators are watched, not memory that a library allocates elsewhere.
    """
    call()  # memory that is allocated once and kept is not scratch
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        result = call()
        torch.cuda.synchronize(device)
        scratch = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        del result
        return scratch
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        result = call()
    assert watched.profiler is not None and watched.profiler.kineto_results is not None
    del result
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    return max(0, *held) - held[-1] if held else 0


@dataclass(frozen=True, slots=True)
class Rates:
    """The idle device's limits: products by dtype, and bytes read or copied."""

    flops_per_s: dict[str, float]
    bytes_per_s: float

    def seconds(self, flops: float, nbytes: float, dtype: str) -> tuple[float, float]:
        """Return the seconds of the products and of the memory; the larger is the minimum of the work."""
        return flops / self.flops_per_s[dtype], nbytes / self.bytes_per_s

    def to_json(self) -> dict[str, Any]:
        return {"flops_per_s": self.flops_per_s, "bytes_per_s": self.bytes_per_s}


def measure_rates(device: torch.device, dtypes: Sequence[str]) -> Rates:
    """Return the best of a few large products per dtype, and the better of a long copy and a long sum."""
    side, rows = _SIDE[device.type], _PRODUCT_ROWS[device.type]
    products = {
        dtype: max(
            rate for _, rate in gemm_rates(rows, rows=side, columns=side, dtype=dtype, device=str(device))
        )
        for dtype in dtypes
    }
    return Rates(products, max(_copy_rate(device), memory_bandwidth(str(device)).high))


def _copy_rate(device: torch.device) -> float:
    """Return the bytes read and written per second, in total."""
    source = torch.ones(_COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    timing = time_in_turns({"copy": lambda: target.copy_(source)}, clock_of(device), 0.1)["copy"]
    return 2 * source.nbytes / timing.least

"""The stream bench on a GPU: the link is that from pinned memory to the device, at several sizes of --vram.

Neither the link nor the device drifts as a shared disk does, so both are measured once, before the engine
takes its memory. Peaks are the engine's own.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from bench.lib.report import Report
from bench.stream.floor import Compute, Floor
from bench.stream.link import copy_bandwidth
from bench.stream.view import show_compute, show_row
from bench.stream.window import Passes, Window, summarise
from offspec.core.config import format_bytes

if TYPE_CHECKING:
    import torch

Load = Callable[[str | None], tuple[Any, Any]]
Rounds = Callable[[Passes, Callable[[], float], Callable[[int], Compute]], list[Window]]


def measure_cuda(
    args: argparse.Namespace, folder: Path, load: Load, rounds: Rounds, report: Report
) -> dict[str, Any]:
    """Passes at every --vram, with the ceilings before them. Raises BenchError without a device."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("there is no CUDA device that torch can use: leave --device out")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    link = copy_bandwidth()
    report.ceiling(f"{format_bytes(link)}/s from pinned memory to the device")
    floor = Floor(folder, dtype, device)
    floors = {count: floor.measure(max(count, 2)) for count in args.tokens}
    for count, compute in floors.items():
        show_compute(count, compute, floor.flops_per_row, report)
    del floor
    runs, every = [], list[dict[str, Any]]()
    for vram in args.vram or [None]:
        run, windows = _run(vram, device, load, rounds, link, floors)
        runs.append(run)
        every += ({"vram": vram, **window.to_json()} for window in windows)
        report.reached(f"{vram or 'all memory'} of the device, peak {format_bytes(run['vram_peak_bytes'])}:")
        for figures in run["rows"]:
            show_row(figures, "link to the device", report)
    return {
        "link_bytes_per_s": link,
        "compute": {str(count): compute.to_json() for count, compute in floors.items()},
        **{
            key: {str(run["vram"]): {str(row["tokens"]): row[key] for row in run["rows"]} for run in runs}
            for key in ("utilisation", "of_bound", "seconds")
        },
        "runs": runs,
        "windows": every,
    }


def _run(
    vram: str | None,
    device: torch.device,
    load: Load,
    rounds: Rounds,
    link: float,
    floors: dict[int, Compute],
) -> tuple[dict[str, Any], list[Window]]:
    """One promise of device memory; when this returns, nothing refers to the engine any more."""
    from offspec.core import memory
    from offspec.model.device import peak_bytes

    _free(device)
    target, placement = load(vram)
    try:
        passes = Passes(target, head=str(placement.head) != "device")
        passes.run(max(floors))
        windows = rounds(passes, lambda: link, floors.__getitem__)
        run = {
            "vram": vram,
            "placement": describe(target, placement),
            "rows": summarise_all(windows),
            "vram_peak_bytes": peak_bytes(device),
            "memory_peak_bytes": memory.peak_bytes(),
        }
    finally:
        target.close()
    return run, windows


def _free(device: torch.device) -> None:
    """Give back what the last engine left in torch's caches: it would count against the next."""
    import torch

    gc.collect()
    if device.type == "cpu":
        return
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0, device)


def describe(target: Any, placement: Any) -> dict[str, Any]:
    """Where the layers went, for the record."""
    tiers = [str(tier) for tier in placement.tiers]
    return {
        **{f"{tier}_layers": tiers.count(tier) for tier in ("device", "host", "disk")},
        "slots": placement.slots,
        "staging": placement.staging,
        "head": str(placement.head),
        "layer_bytes": max(target.layer_bytes),
    }


def summarise_all(windows: list[Window]) -> list[dict[str, Any]]:
    """A summary for each number of tokens, in order."""
    counts = sorted({window.tokens for window in windows})
    return [summarise([window for window in windows if window.tokens == count]) for count in counts]

"""The stream bench on a GPU: the link is that from pinned memory to the device, at several sizes of --vram.

Neither the link nor the device drifts as a shared disk does, so both are measured once, before the engine
takes its memory. Peaks are the engine's own.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from bench.lib.report import Report
from bench.stream.floor import Compute, Floor
from bench.stream.target import describe, load
from bench.stream.view import show_compute, show_row
from bench.stream.window import Passes, Window, run_rounds, summarise_all
from offspec.core.config import format_bytes
from offspec_planners.measure import copy_bandwidth

if TYPE_CHECKING:
    import torch


def measure_cuda(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any]:
    """Passes at every --vram, with the ceilings before them. Raises BenchError without a device."""
    import torch

    if not torch.cuda.is_available():
        raise BenchError("there is no CUDA device that torch can use: leave --device out")
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    link = copy_bandwidth().high
    report.ceiling(f"{format_bytes(link)}/s from pinned memory to the device")
    floor = Floor(folder, dtype, device)
    floors = {count: floor.measure(max(count, 2)) for count in args.tokens}
    for count, compute in floors.items():
        show_compute(count, compute, floor.flops_per_row, report)
    del floor
    runs, every = [], list[dict[str, Any]]()
    for vram in args.vram or [None]:
        run, windows = _run(args, folder, vram, link, floors, report)
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
    args: argparse.Namespace,
    folder: Path,
    vram: str | None,
    link: float,
    floors: dict[int, Compute],
    report: Report,
) -> tuple[dict[str, Any], list[Window]]:
    """One limit of device memory; when this returns, nothing refers to the engine any more."""
    import torch

    from offspec.core import memory
    from offspec.model.device import peak_bytes

    device = torch.device(args.device)
    _free(device)
    target, placement = load(args, folder, vram)
    try:
        passes = Passes(target, head=str(placement.head) != "device")
        passes.run(max(floors))
        windows = run_rounds(args, passes, lambda: link, floors.__getitem__, report)
        run = {
            "vram": vram,
            "placement": describe(target, placement),
            "rows": summarise_all(windows),
            "vram_peak_bytes": peak_bytes([device]),
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

"""How busy the link is while a model streams: passes of 1 to 1,024 tokens beside the raw rate of its files.

    python -m bench.stream [--memory 1.5GB] [--tokens 1 64 256 1024] [--resident 0]

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run), placed as the engine decides, without a
draft. Readings of the disk and of the processor are taken right before and right after each window of passes,
by which the window is judged: a shared disk changes its speed from minute to minute. The rounds go through
all numbers of tokens in turns. `bench.gpu_day` measures the link to a GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.lib import random_model
from bench.lib.cgroup import BenchError
from bench.lib.command import Command, shared
from bench.lib.report import Report
from bench.lib.streamed import widened
from bench.stream.floor import Floor
from bench.stream.target import describe, load, streamed_files
from bench.stream.view import shares, show_compute, show_disk, show_row
from bench.stream.window import Passes, run_rounds, summarise_all
from offspec.core.values import parse_bytes
from offspec_planners.measure.disk import RawDisk


def find_model(args: argparse.Namespace) -> Path:
    """The folder of the model that is streamed, built if need be."""
    if not args.shape:
        return widened(args)
    if args.target is None:
        raise BenchError("name a folder for the random model with --target: it takes gigabytes")
    shape = random_model.SHAPES[args.shape]
    return random_model.build(replace(shape, layers=args.layers or shape.layers), args.target)


def measure(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any]:
    """The target in RAM, its layers from disk: what was reached, with every window and reading."""
    from offspec.core import memory

    target, placement = load(args, folder)
    try:
        passes = Passes(target, head=str(placement.head) != "device")
        passes.run(max(args.tokens))  # the most memory that any pass takes
        passes.settle()
        peak = memory.peak_bytes()  # of the engine alone: what follows is the bench's own
        shape = (args.raw_threads, 4 << 20) if args.raw_threads else None
        raw = RawDisk(streamed_files(target, placement), parse_bytes(args.raw_bytes), shape)
        streamed = sum(target.layer_bytes) - sum(target.layer_bytes[i] for i in placement.resident)
        show_disk(raw, streamed, report)
        floor = Floor(folder, target.dtype, target.device)
        for count in args.tokens:
            show_compute(count, floor.measure(max(count, 2)), floor.flops_per_row, report)
        windows = run_rounds(args, passes, raw.read, lambda tokens: floor.measure(max(tokens, 2)), report)
        where = describe(target, placement)
    finally:
        target.close()
    rows = summarise_all(windows)
    for row in rows:
        show_row(row, report)
    return {
        "placement": where,
        "raw": {
            "direct": raw.direct,
            "threads": raw.threads,
            "block": raw.block,
            "sweep_bytes_per_s": raw.sweep_json(),
            "readings_bytes_per_s": raw.readings,
        },
        **shares(rows),
        "rows": rows,
        "windows": [window.to_json() for window in windows],
        "peak_memory_bytes": peak,
    }


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "dtype", "raw_bytes", "raw_threads", memory="1.5GB")
    p.add_argument("--shape", choices=sorted(random_model.SHAPES), help="a random model instead, in --target")
    p.add_argument("--layers", type=int, help="layers of the random model (default: the shape's)")
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 1024],
                   help="of a pass (default 1 64 256 1024)")  # fmt: skip
    p.add_argument("--resident", type=int, metavar="N", help="keep N layers, whatever --memory allows")
    p.add_argument("--slots", type=int, default=3, help="of the ring, with --resident (default 3)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=10.0, help="least length of a window (default 10)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build what is missing, measure and tell."""
    args.tokens = sorted(set(args.tokens))
    folder = find_model(args)
    found = measure(args, folder, report)
    import torch

    record = {
        **report.head(args, "dtype"),
        "model": folder.name,
        "memory_bytes": parse_bytes(args.memory) if args.resident is None else None,
        "torch_threads": torch.get_num_threads(),
        **found,
    }
    report.record(record)
    return {key: value for key, value in record.items() if key != "windows"}


main = Command("stream", "Link utilisation of a streamed model.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

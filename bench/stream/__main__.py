"""Link utilization while a model streams: passes of 1 to 1,024 tokens relative to the raw rate of its files.

    python -m bench.stream [--memory 1.5GB] [--tokens 1 64 256 1024] [--resident 0]

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run), placed by the engine, without a draft. The
disk and the processor are measured right before and right after each window of passes, as its reference: a
shared disk changes its speed from minute to minute. Rounds alternate between the numbers of tokens.
`bench.gpu_day` measures the link to a GPU.
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
from bench.lib.streamed import widened_model
from bench.stream.floor import ComputeFloor
from bench.stream.target import describe, load, streamed_files
from bench.stream.view import shares, show_compute, show_disk, show_row
from bench.stream.window import PassRunner, run_rounds, summarize_all
from offspec.core.values import parse_bytes
from offspec_planners.measure.disk import RawDisk


def find_model(args: argparse.Namespace) -> Path:
    """Return the folder of the model to stream, built if necessary."""
    if not args.shape:
        return widened_model(args)
    if args.target is None:
        raise BenchError("name a folder for the random model with --target: it takes gigabytes")
    shape = random_model.SHAPES[args.shape]
    return random_model.build(replace(shape, layers=args.layers or shape.layers), args.target)


def measure(args: argparse.Namespace, folder: Path, report: Report) -> dict[str, Any]:
    """Stream the layers from disk; return the results with every window and measurement."""
    from offspec.core import memory

    target, placement = load(args, folder)
    try:
        passes = PassRunner(target, head=str(placement.head) != "device")
        passes.run(max(args.tokens))  # the pass that uses the most memory
        passes.settle()
        peak = memory.peak_bytes()  # of the engine alone, before the bench allocates memory
        shape = (args.raw_threads, 4 << 20) if args.raw_threads else None
        raw = RawDisk(streamed_files(target, placement), parse_bytes(args.raw_bytes), shape)
        streamed = sum(target.layer_bytes) - sum(target.layer_bytes[i] for i in placement.resident)
        show_disk(raw, streamed, report)
        floor = ComputeFloor(folder, target.dtype, target.device)
        for count in args.tokens:
            show_compute(count, floor.measure(max(count, 2)), floor.flops_per_row, report)
        windows = run_rounds(args, passes, raw.read, lambda tokens: floor.measure(max(tokens, 2)), report)
        where = describe(target, placement)
    finally:
        target.close()
    rows = summarize_all(windows)
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
    p.add_argument("--shape", choices=sorted(random_model.SHAPES), help="use a random model, in --target")
    p.add_argument("--layers", type=int, help="layers of the random model (default: the shape's)")
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 64, 256, 1024],
                   help="tokens per pass (default 1 64 256 1024)")  # fmt: skip
    p.add_argument("--resident", type=int, metavar="N", help="keep N layers, regardless of --memory")
    p.add_argument("--slots", type=int, default=3, help="ring buffer slots, with --resident (default 3)")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--seconds", type=float, default=10.0, help="minimum length of a window (default 10)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build missing files, measure and report."""
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


main = Command("stream", "Link utilization of a streamed model.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

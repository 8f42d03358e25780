"""Time to first token of a long prompt, relative to one read of the weights and the processor's minimum time.

    python -m bench.prefill [--tokens 4096] [--repeats 3] [--pack nf4] [--memory 1.5GB]

Prompts are random tokens, so no part of one is cached. The disk is measured in the same process before and
after each prompt, once the engine has prefetched all it can; the processor's minimum time is measured first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from statistics import median

from bench.lib.report import Report, ratio
from bench.lib.runner import (
    Figures,
    Job,
    Rows,
    comparison_bench,
    prepare_streamed,
    settings,
    streamed_options,
)
from bench.lib.streamed import pack_of
from bench.stream.floor import ComputeFloor
from offspec.core.config import SamplingParams
from offspec.core.values import parse_bytes
from offspec_planners.measure.disk import RawDisk

WANTED = 1.2
_SETTLE_S = 2.0  # time for the streaming buffer to fill


def options(p: argparse.ArgumentParser) -> None:
    streamed_options(p, tokens=4096, budget=64)
    p.add_argument("--repeats", type=int, default=3, help="prompts per process (default 3)")
    p.add_argument("--pack", choices=("nf4", "int4-g64"), help="format of the pack to stream (default: none)")


def ways(args: argparse.Namespace, report: Report) -> dict[str, Job]:
    import torch

    from offspec.model.runner import CHUNK

    folder, files = prepare_streamed(args, report)
    floor = ComputeFloor(folder, getattr(torch, args.dtype), torch.device("cpu")).measure(args.tokens, CHUNK)
    report.ceiling(
        f"{floor.gemm:.2f} s of products for {args.tokens} tokens, {floor.attention:.2f} s of attention"
    )
    target = pack_of(folder, args.pack) if args.pack else folder
    trees = {"draft": "none", "budget": args.budget, "context": args.tokens + args.budget}
    job = {
        "load": settings(args, target, **trees),
        "layer_files": files,
        "raw_bytes": parse_bytes(args.raw_bytes),
        "floor": [floor.gemm, floor.attention],
        "tokens": args.tokens,
        "repeats": args.repeats,
    }
    return {args.pack or args.dtype: job}


def measure(job: Job) -> Figures:
    import offspec

    disk = RawDisk([Path(file) for file in job["layer_files"]], job["raw_bytes"])
    chosen, seconds, rates = random.Random(0), list[float](), list[float]()
    with offspec.load(**job["load"]) as engine:
        few = engine.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))
        trip = ratio(few.bytes_streamed, few.passes)
        for _ in range(job["repeats"]):
            rates.append(_settled(disk))
            prompt = chosen.choices(range(3, 90), k=job["tokens"])
            seconds.append(engine.generate(prompt, SamplingParams(max_tokens=1)).ttft_s)
            rates.append(_settled(disk))
    gemm, attention = job["floor"]
    link, taken = ratio(trip, median(rates)), median(seconds)
    return {
        "seconds": taken,
        "trip_seconds": link,
        "gemm_seconds": gemm,
        "attention_seconds": attention,
        "ratio": ratio(taken, max(link, gemm)),
        "ratio_with_attention": ratio(taken, max(link, gemm + attention)),
    }


def _settled(disk: RawDisk) -> float:
    time.sleep(_SETTLE_S)
    return disk.read()


def shortfalls(rows: Rows, args: argparse.Namespace) -> list[str]:
    return [
        f"{way}: {row['ratio_with_attention']:.2f} of the bound, more than {WANTED}"
        for way, row in rows.items()
        if row["ratio_with_attention"] > WANTED
    ]


_COLUMNS = ("seconds", "trip_seconds", "gemm_seconds", "attention_seconds", "ratio", "ratio_with_attention")
main = comparison_bench(
    "prefill", "Time to first token.", options, ways, dict.fromkeys(_COLUMNS, ".2f"), shortfalls
)

if __name__ == "__main__":
    sys.exit(main())

"""Seconds from a long prompt to its first token, beside one trip of the weights and the processor's floor.

    python -m bench.prefill [--tokens 512 1024 2048 4096] [--draft demo] [--memory 1.5GB] [--pack nf4]

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run). The engine runs in a process of its own,
in a memory cgroup where there is the right to make one, and is given prompts of random tokens, a different
one each time, so that no part of one is in the cache. The raw rate of the disk is measured there right before
and right after each prompt; the processor's floor in the other process, before it starts and after it ended.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib import plots
from bench.lib.command import Command, shared
from bench.lib.process import measured_job
from bench.lib.report import Report, ratio
from bench.lib.streamed import layer_files, pack_of, widened
from bench.stream.floor import Compute, Floor
from bench.stream.view import show_disk
from offspec.checkpoint.widen import read_recipe
from offspec.core.config import format_bytes, parse_bytes
from offspec_planners.measure import RawDisk

WANTED = 1.2


def run_engine(args: argparse.Namespace, folder: Path, draft: str, raw: RawDisk) -> dict[str, Any]:
    """The measured process: what it says, with the peaks of its cgroup where it ran in one."""
    job = {
        "load": {
            "model": pack_of(folder, args.pack) if args.pack else str(folder),
            "draft": draft,
            "draft_bits": args.draft_bits,
            "memory": args.engine_memory or args.memory,
            "dtype": args.dtype,
            "budget": args.budget,
            "context": max(args.tokens) + args.budget,
        },
        "tokens": args.tokens,
        "repeats": args.repeats,
        "files": [str(file) for file in layer_files(folder, read_recipe(folder))],
        "raw_bytes": parse_bytes(args.raw_bytes),
        "raw_shape": [raw.threads, raw.block],
    }
    return measured_job(args, "bench.prefill.worker", job)


def tally(
    found: dict[str, Any], floors: dict[int, Compute], recipe: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Medians by length of the prompt, beside one trip of the layers that stream and the floor.

    recipe: of the widened model, whose bytes a trip has; None where a pack's are to be taken as they came.
    """
    placement, rows = found["placement"], []
    for tokens, floor in floors.items():
        runs = [run for run in found["runs"] if run["tokens"] == tokens]
        trip = statistics.median(run["bytes"] for run in runs)
        if recipe is not None:
            trip = recipe["layer_bytes"] * placement["streamed_layers"] / len(recipe["layer_files"])
            trip += recipe["head_bytes"] if placement.get("head", "device") != "device" else 0
        seconds = statistics.median(run["seconds"] for run in runs)
        rate = statistics.median((run["raw_before"] + run["raw_after"]) / 2 for run in runs)
        compute = floor.gemm + floor.attention
        link = ratio(trip, rate)
        rows.append(
            {
                "tokens": tokens,
                "seconds": seconds,
                "spread": [min(run["seconds"] for run in runs), max(run["seconds"] for run in runs)],
                "draft_seconds": statistics.median(run["draft_seconds"] for run in runs),
                "bytes": statistics.median(run["bytes"] for run in runs),
                "trip_bytes": trip,
                "trip_seconds": link,
                "raw_bytes_per_s": rate,
                **floor.to_json(),
                "compute_seconds": compute,
                "ratio": ratio(seconds, max(link, floor.gemm)),
                "ratio_with_attention": ratio(seconds, max(link, compute)),
                "ratio_with_layers": ratio(seconds, max(link, floor.layers)),
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]], draft: str, report: Report) -> None:
    """Each length of the prompt beside its floors; a larger ratio is worse here."""
    for row in rows:
        beside = f", of it draft {row['draft_seconds']:.2f}" if row["draft_seconds"] >= 0.005 else ""
        report.reached(
            f"{row['tokens']} tokens, draft {draft}: first token after {row['seconds']:.2f} s{beside}; one "
            f"trip of {format_bytes(row['trip_bytes'])} {row['trip_seconds']:.2f} s, GEMM "
            f"{row['gemm_seconds']:.2f}, attention {row['attention_seconds']:.2f}; over max(trip, GEMM) "
            f"{row['ratio']:.2f}, over max(trip, GEMM + attention)",
            row["ratio_with_attention"],
        )


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "engine_memory", "dtype", "raw_bytes", "raw_threads", "no_cgroup")
    shared(p, draft_bits=4, budget=64, memory="1.5GB")
    p.add_argument("--tokens", type=int, nargs="+", default=[4096], help="of prompts (default 4096)")
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--pack", choices=("nf4", "int4-g64"), help="of the target, which then streams packed")
    p.add_argument("--draft", help="measure once more with this draft (default: only without one)")
    p.set_defaults(keep_caches=True)  # what streams is read past them


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build what is missing, measure and tell."""
    import torch

    from offspec.model.runner import CHUNK

    args.tokens = sorted(set(args.tokens))
    folder = widened(args)
    recipe = read_recipe(folder)
    shape = (args.raw_threads, 4 << 20) if args.raw_threads else None
    raw = RawDisk(layer_files(folder, recipe), parse_bytes(args.raw_bytes), shape)
    show_disk(raw, recipe["layer_bytes"], report)
    floor = Floor(folder, getattr(torch, args.dtype), torch.device("cpu"))
    before = {count: floor.measure(count, CHUNK) for count in args.tokens}
    for count, compute in before.items():
        report.ceiling(
            f"{compute.gemm:.2f} s of GEMM for {count} tokens, {min(CHUNK, count)} at a time "
            f"({floor.flops_per_row * count / compute.gemm / 1e9:.0f} GFLOP/s), {compute.attention:.2f} s of "
            f"attention; {compute.layers:.2f} s for all layers, weights in memory"
        )
    drafts = dict.fromkeys(["none", *([args.draft] if args.draft else [])])
    found = {draft: run_engine(args, folder, draft, raw) for draft in drafts}
    after = {count: floor.measure(count, CHUNK) for count in args.tokens}
    floors = {count: before[count].mean(after[count]) for count in args.tokens}
    results = {
        draft: tally(figures, floors, None if args.pack else recipe) for draft, figures in found.items()
    }
    first = results["none"][-1]
    for draft, rows in results.items():
        show(rows, found[draft]["draft"], report)
        report.note(f"draft {found[draft]['draft']}: {json.dumps(found[draft]['placement'])}")
    record = {
        "bench": report.name,
        "model": folder.name,
        "pack": args.pack,
        "memory_bytes": parse_bytes(args.memory),
        "dtype": args.dtype,
        "chunk": CHUNK,
        "torch_threads": torch.get_num_threads(),
        "cgroup": not args.no_cgroup,
        "tokens": first["tokens"],
        **{key: first[key] for key in ("seconds", "ratio", "ratio_with_attention", "ratio_with_layers")},
        "within_1.2": {
            "of_gemm": first["ratio"] <= WANTED,
            "of_gemm_and_attention": first["ratio_with_attention"] <= WANTED,
        },
        "rows": results,
        "placement": {draft: figures["placement"] for draft, figures in found.items()},
        "peaks": {
            draft: {key: value for key, value in figures.items() if key.endswith("peak_bytes")}
            for draft, figures in found.items()
        },
    }
    report.record(record, processes=found)
    report.note(plots.prefill_plot(results["none"], folder.name, report.file(suffix=".svg")))
    return record


main = Command("prefill", "A long prompt in one trip.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

"""The same model in NF4 and in bfloat16, streamed in the same memory: what a pass and an answer take.

    python -m bench.quantised [--memory 1.5GB] [--tokens-per-pass 1 64] [--prompts 2]

Target: SmolLM2-135M-Instruct widened ×4, and its pack (both made on the first run). Windows of passes come
first, without a draft, both targets in turns, each in a process and memory cgroup of its own that starts with
an empty page cache. A window is judged by the link as it was right before and after it, and by what unpacking
all layers once and the products of as many rows took right before and after its process. Then prompts are
answered with speculation: with the budget and width that are given, and with those that a plan chooses.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import child, measured_job, tell_liberties
from bench.lib.report import Prompt, Report, model_name, read_prompts
from bench.lib.streamed import ask, layer_files, pack_of, raw_bandwidth, widened
from bench.quantised.tally import BF16, NF4, judged, passes, rows_of, shortfalls, speeds
from bench.quantised.view import NOTE, show, show_ceiling
from offspec.checkpoint.widen import read_recipe
from offspec.core.config import format_bytes, parse_bytes

OFF, GIVEN, PLANNED = "off", "as given", "as planned"


def read_floor(args: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """What the processor needs for a pass just now, measured outside the cgroup."""
    rows = [str(rows_of(count)) for count in args.tokens]
    words = [str(folders[NF4]), str(folders[BF16]), "--dtype", args.dtype, "--rows", *rows]
    found: dict[str, Any] = json.loads(child("bench.quantised.floor", *words))
    return found


def run_windows(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One measured process of windows: its figures, with the cgroup's peaks beside them."""
    job = {
        "model": str(folder),
        "memory": parse_bytes(args.engine_memory or args.memory),
        "dtype": args.dtype,
        "tokens": args.tokens,
        "seconds": args.seconds,
        "raw_bytes": parse_bytes(args.raw_bytes),
    }
    return measured_job(args, "bench.quantised.worker", job)


def measure_passes(
    args: argparse.Namespace, folders: dict[str, Path], floor: dict[str, Any], report: Report
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Windows by target, each judged, and the processes as they were."""
    windows: dict[str, list[dict[str, Any]]] = {BF16: [], NF4: []}
    processes = []
    for turn in range(args.rounds):
        for kind in (BF16, NF4) if turn % 2 == 0 else (NF4, BF16):
            report.progress(f"round {turn + 1}, passes in {kind}")
            found = run_windows(args, folders[kind])
            before, floor = floor, read_floor(args, folders)
            judged_ones = [judged(w, before, floor, packed=kind == NF4) for w in found["windows"]]
            windows[kind] += judged_ones
            processes.append({"kind": kind, **found, "floor_before": before, "floor_after": floor})
            for one in judged_ones:
                report.progress(
                    f"  {one['tokens']} tokens: {one['seconds']:.3f} s a pass, {one['over_bound']:.2f} of "
                    f"the bound, {format_bytes(one['bytes'])}"
                )
    return windows, processes


def measure_answers(
    args: argparse.Namespace, folders: dict[str, Path], prompts: Sequence[Prompt], report: Report
) -> list[dict[str, Any]]:
    """Every prompt in every way by both targets, in turns."""
    ways = {
        OFF: (args.budget, args.width, False),
        GIVEN: (args.budget, args.width, True),
        PLANNED: (None, None, True),
    }
    runs = []
    for number, prompt in enumerate(prompts):
        for way, (budget, width, on) in ways.items():
            for kind in (BF16, NF4) if number % 2 == 0 else (NF4, BF16):
                report.progress(f"{prompt.id} in {kind}, speculation {way}")
                asked = argparse.Namespace(**{**vars(args), "budget": budget, "width": width})
                group, temperature = [(number, prompt)], args.temperature
                found = ask(asked, folders[kind], group, temperature, on)
                runs.append({**found, "kind": kind, "way": way})
    return runs


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "engine_memory", "off_tokens", "budget", "width", "dtype", "seed")
    shared(
        p, "keep_caches", "no_cgroup", draft_bits=4, memory="1.5GB", prompts=2, context=1024, raw_bytes="1GB"
    )
    p.add_argument("--draft", help="default: the small model")
    p.add_argument("--tokens-per-pass", dest="tokens", type=int, nargs="+", default=[1, 64], metavar="N",
                   help="of passes in windows (default 1 64)")  # fmt: skip
    p.add_argument("--rounds", type=int, default=3, help="windows of each target and number of tokens")
    p.add_argument("--seconds", type=float, default=10.0, help="that a window lasts (default 10)")
    p.add_argument("--answer-tokens", type=int, default=48, help="most new tokens of an answer")
    p.add_argument("--temperature", type=float, default=0.0)
    p.set_defaults(check=False)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Make what is missing, measure and tell."""
    folder = widened(args)
    folders = {BF16: folder, NF4: Path(pack_of(folder))}
    args.draft, recipe = args.draft or args.model, read_recipe(folder)
    disk, floor = raw_bandwidth(args, layer_files(folder, recipe)), read_floor(args, folders)
    ceiling = {
        "raw_bytes_per_s": disk.bytes_per_s,
        "direct": disk.direct,
        "layer_bytes": {BF16: recipe["layer_bytes"], NF4: floor["unpacked_bytes"]},
        **floor,
    }
    show_ceiling(ceiling, report)
    liberties = tell_liberties(args, report)
    windows, processes = measure_passes(args, folders, floor, report)
    asked = argparse.Namespace(**{**vars(args), "tokens": args.answer_tokens})
    runs = measure_answers(asked, folders, read_prompts(args.prompts), report) if args.prompts else []
    rows = passes(windows)
    answered = speeds(runs, (GIVEN, PLANNED), OFF) if runs else None
    keys = ("factor", "draft_bits", "dtype", "budget", "width", "context", "answer_tokens", "temperature")
    summary = {
        **report.head(args, *keys),
        "model": folder.name,
        "draft": f"draft {model_name(args.draft)} in {args.draft_bits} bits",
        "memory_bytes": parse_bytes(args.memory),
        "liberties": liberties,
        "ceiling": ceiling,
        "passes": rows,
        "answers": answered,
        "shortfalls": shortfalls(rows, answered),
        "note": NOTE,
    }
    show(summary, report)
    report.record(summary, processes=processes, answer_processes=runs)
    for sentence in summary["shortfalls"]:
        report.missed(sentence)
    return summary


main = Command("quantised", "NF4 beside bfloat16, streamed.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

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
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.lib.cgroup import drop_caches, run_limited
from bench.lib.report import Prompt, Report, command_line, environment, model_name, read_prompts, write_result
from bench.lib.widen import read_recipe
from bench.offload import __main__ as offload
from bench.offload.__main__ import child, liberties_of, raw_bandwidth, target_options, widened
from bench.peers.quantised import pack_of
from bench.quantised.tally import BF16, NF4, judged, passes, rows_of, shortfalls, speeds
from bench.quantised.view import NOTE, show, show_ceiling
from offspec.core.config import format_bytes, parse_bytes
from offspec.core.errors import OffspecError

NAME = "quantised"
OFF, GIVEN, PLANNED = "off", "as given", "as planned"
_ROOT = Path(__file__).parents[2]


def read_floor(args: argparse.Namespace, folders: dict[str, Path]) -> dict[str, Any]:
    """What the processor needs for a pass just now, measured outside the cgroup."""
    rows = [str(rows_of(count)) for count in args.tokens]
    words = [str(folders[NF4]), str(folders[BF16]), "--dtype", args.dtype, "--rows", *rows]
    found: dict[str, Any] = json.loads(child("bench.quantised.floor", *words).splitlines()[-1])
    return found


def run_windows(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One measured process of windows: its figures, with the cgroup's peaks beside them."""
    job = json.dumps(
        {
            "model": str(folder),
            "memory": parse_bytes(args.engine_memory or args.memory),
            "dtype": args.dtype,
            "tokens": args.tokens,
            "seconds": args.seconds,
            "raw_bytes": parse_bytes(args.raw_bytes),
        }
    )
    argv = [sys.executable, "-m", "bench.quantised.worker", job]
    if not args.keep_caches:
        drop_caches()
    output, peaks = run_limited(argv, None if args.no_cgroup else parse_bytes(args.memory), cwd=_ROOT)
    return {**json.loads(output.splitlines()[-1]), **peaks}


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
                found = offload.run_worker(asked, folders[kind], group, temperature, on)
                runs.append({**found, "kind": kind, "way": way})
    return runs


def parser() -> argparse.ArgumentParser:
    """The command line of this bench. Some names are those that bench.offload's worker looks for."""
    p = argparse.ArgumentParser(prog=f"python -m bench.{NAME}", description="NF4 beside bfloat16, streamed.")
    target_options(p)
    p.add_argument("--draft", help="default: the small model")
    p.add_argument("--draft-bits", type=int, choices=(2, 3, 4, 16), default=4)
    p.add_argument("--memory", default="1.5GB", help="the cgroup's limit for each target (default 1.5GB)")
    p.add_argument("--engine-memory", help="what the engine is promised (default: the limit)")
    p.add_argument("--tokens-per-pass", dest="tokens", type=int, nargs="+", default=[1, 64], metavar="N",
                   help="of passes in windows (default 1 64)")  # fmt: skip
    p.add_argument("--rounds", type=int, default=3, help="windows of each target and number of tokens")
    p.add_argument("--seconds", type=float, default=10.0, help="that a window lasts (default 10)")
    p.add_argument("--prompts", type=int, default=2, help="answered with speculation (default 2; 0: none)")
    p.add_argument("--answer-tokens", type=int, default=48, help="most new tokens of an answer")
    p.add_argument("--off-tokens", type=int, default=8, help="most new tokens with speculation off")
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--budget", type=int, default=256)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--context", type=int, default=1024, help="tokens of prompt and answer")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--raw-bytes", default="1GB", help="how much is read to find the raw rate (default 1GB)")
    p.add_argument("--keep-caches", action="store_true", help="do not drop the page cache (needs no root)")
    p.add_argument("--no-cgroup", action="store_true", help="do not limit the memory (needs no root)")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    p.set_defaults(check=False)
    return p


def bench(args: argparse.Namespace, words: Sequence[str], report: Report) -> dict[str, Any]:
    """Make what is missing, measure, print, and write the result; returns the last line's object."""
    folder = widened(args)
    folders = {BF16: folder, NF4: Path(pack_of(folder))}
    args.draft, recipe = args.draft or args.model, read_recipe(folder)
    disk, floor = raw_bandwidth(args, folder, recipe), read_floor(args, folders)
    ceiling = {
        "raw_bytes_per_s": disk.bytes_per_s,
        "direct": disk.direct,
        "layer_bytes": {BF16: recipe["layer_bytes"], NF4: floor["unpacked_bytes"]},
        **floor,
    }
    show_ceiling(ceiling, report)
    if liberties_of(args):
        report.note("measured without " + " and without ".join(liberties_of(args)))
    windows, processes = measure_passes(args, folders, floor, report)
    asked = argparse.Namespace(**{**vars(args), "tokens": args.answer_tokens})
    runs = measure_answers(asked, folders, read_prompts(args.prompts), report) if args.prompts else []
    rows = passes(windows)
    answered = speeds(runs, (GIVEN, PLANNED), OFF) if runs else None
    keys = ("factor", "draft_bits", "dtype", "budget", "width", "context", "answer_tokens", "temperature")
    summary = {
        "bench": NAME,
        "model": folder.name,
        "draft": f"draft {model_name(args.draft)} in {args.draft_bits} bits",
        "memory_bytes": parse_bytes(args.memory),
        **{key: getattr(args, key) for key in keys},
        "liberties": liberties_of(args),
        "ceiling": ceiling,
        "passes": rows,
        "answers": answered,
        "shortfalls": shortfalls(rows, answered),
        "note": NOTE,
    }
    show(summary, report)
    record = {**summary, "command": command_line(f"bench.{NAME}", words), "environment": environment()}
    write_result(NAME, {**record, "processes": processes, "answer_processes": runs}, args.json)
    return summary


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON. Exit code 1 where an aim was missed."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    try:
        summary = bench(args, words, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for sentence in summary["shortfalls"]:
        report.note(sentence)
    report.last_line(summary)
    return 1 if summary["shortfalls"] else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

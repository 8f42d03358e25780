"""Predicted and measured speed of plans: `offspec plan --replan --validate` in a memory cgroup.

    python -m bench.plan [--factors 1 2 4] [--cases x1:1GB:0 x4:least:0 x4:3GB:1] [--prompts 8] [--what-ifs]

Targets are SmolLM2-135M-Instruct (x1) and its widened copies (x2, x4; built on the first run), drafted by the
small model in 4 bits. Every case is a process in a memory cgroup of exactly the planned memory, started with
an empty page cache. `least` is the minimum memory that is accepted. A run may be limited to some cases: the
record keeps those of earlier runs on the same machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.command import Command, shared
from bench.lib.process import note_unmet_limits, run_measured
from bench.lib.record import keep
from bench.lib.report import Report, model_name, ratio
from bench.lib.streamed import raw_bandwidth
from bench.plan.cases import CASES, Case, Target
from bench.plan.what_ifs import check
from offspec.checkpoint import open_checkpoint
from offspec.core.cache_dir import cache_root
from offspec_planners.units import format_bytes

LIMITS = {"seconds_per_pass": 0.10, "tok_per_s": 0.15}  # maximum error of a median over prompts
# Recorded fields of a plan: decisions and expectations, without the machine and the sweep.
_OF_PLAN = ("budget", "width", "draft_mode", "context", "acceptance", "placement", "costs", "forecast",
            "least_memory", "what_ifs")  # fmt: skip


def read_disk(args: argparse.Namespace, target: Target) -> float:
    """Return the current read rate of the target's own files, in bytes per second."""
    files = sorted({tensor.file for tensor in open_checkpoint(target.model).tensors.values()})
    return raw_bandwidth(args, files).bytes_per_s


@contextmanager
def cache_of_its_own(wanted: bool) -> Iterator[list[str]]:
    """Yield a command prefix that uses the models in the user's cache, but no saved calibration or plans."""
    if not wanted:
        yield []
        return
    with TemporaryDirectory(prefix="offspec-bench-") as folder:
        for name in ("described", "unpacked", "widened"):
            (Path(folder) / name).symlink_to(cache_root() / name)
        yield ["env", f"OFFSPEC_CACHE={folder}"]


def validate(
    args: argparse.Namespace, case: Case, target: Target, memory: int, besides: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the result of `offspec plan --validate` in a process, and its peaks. besides: more options."""
    asked = ("--memory", str(memory), "--temperature", f"{case.temperature:g}")
    options = ("--replan", "--validate", "--prompts", str(args.prompts), "--json", "--quiet")
    words = ["-m", "offspec", "plan", *target.words(besides), *asked, *options, "--device", "cpu"]
    with cache_of_its_own(args.first_run) as before:
        line, peaks = run_measured(args, [*before, sys.executable, *words], memory)
    return json.loads(line), peaks


def measure(args: argparse.Namespace, case: Case, target: Target) -> dict[str, Any]:
    """Plan and validate; return predicted and measured figures, and a summary of the plan."""
    memory = case.memory_bytes(target)
    raw, began = read_disk(args, target), time.perf_counter()
    found, peaks = validate(args, case, target, memory)
    passes = [row["seconds_per_pass"] for row in found["rows"]]
    plan = {key: found["plan"][key] for key in _OF_PLAN}
    plan["disk_bytes"] = sum(part["bytes"] for part in found["plan"]["parts"] if part["tier"] == "disk")
    return {
        "memory_bytes": memory,
        "raw_bytes_per_s": raw,
        "seconds": time.perf_counter() - began,
        **{key: found[key] for key in ("seconds_per_pass", "tok_per_s", "tokens_per_pass", "rows")},
        "missed": [key for key, limit in LIMITS.items() if not found[key]["error"] <= limit],
        # Prompts whose passes took more than twice as long as predicted.
        "stalled": sum(figure["measured"] > 2 * figure["predicted"] for figure in passes),
        "plan": plan,
        **peaks,
    }


def run_case(args: argparse.Namespace, case: Case, target: Target, about: dict[str, Any]) -> dict[str, Any]:
    """Return a case for the record: its figures, or its error."""
    about = {
        **about,
        "case": str(case),
        "order": [case.factor, case.temperature, case.memory != "least"],
        "model": model_name(target.model),
        "draft": target.draft if target.draft == "self" else f"{model_name(target.draft)} in 4 bits",
        "temperature": case.temperature,
        "prompts": args.prompts,
        "first_run": args.first_run,
    }
    try:
        found = measure(args, case, target)
    except BenchError as error:
        return {**about, "error": str(error), "missed": list(LIMITS)}
    about["order"].append(found["memory_bytes"])
    return {**about, **found}


def show_case(case: dict[str, Any], report: Report) -> None:
    """Print one line for the pass and one for the speed; the ratio is predicted over measured, ideally 1."""
    if "error" in case:
        report.note(f"{case['case']}: {case['error']}")
        return
    link = ratio(case["plan"]["disk_bytes"], case["raw_bytes_per_s"])
    for key, unit in (
        ("seconds_per_pass", f"s per pass, {link:.2f} of the disk alone"),
        ("tok_per_s", "tok/s"),
    ):
        figure = case[key]
        report.reached(
            f"{case['case']}: {figure['measured']:.3g} {unit}, {figure['predicted']:.3g} predicted",
            ratio(figure["predicted"], figure["measured"]),
        )


def show(cases: Sequence[dict[str, Any]], report: Report) -> None:
    """Print all cases of the record: medians over prompts."""
    heads = ("memory", "budget, width", "s/pass", "error", "tok/s", "error", "tokens/pass", "stalled")
    title = "predicted / measured, medians over prompts"
    report.table(title, ("case", *heads), [[case["case"], *_cells(case)] for case in cases])


def _cells(case: dict[str, Any]) -> list[str]:
    if "error" in case:
        return ["failed"]
    cells = [format_bytes(case["memory_bytes"]), f"{case['plan']['budget']}, {case['plan']['width']}"]
    for key in ("seconds_per_pass", "tok_per_s"):
        cells += [_pair(case[key]), f"{case[key]['error']:.1%}{' !' if key in case['missed'] else ''}"]
    return [*cells, _pair(case["tokens_per_pass"]), f"{case['stalled']}/{len(case['rows'])}"]


def _pair(figure: dict[str, float]) -> str:
    return f"{figure['predicted']:.3g} / {figure['measured']:.3g}"


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "raw_bytes", "keep_caches", "no_cgroup", prompts=8)
    p.add_argument("--factors", type=int, nargs="+", default=[1, 2, 4],
                   help="factors of the standard cases (default 1 2 4)")  # fmt: skip
    p.add_argument("--cases", type=Case.parse, nargs="+", metavar="CASE",
                   help=f"factor:memory:temperature instead of the standard {' '.join(CASES)}")  # fmt: skip
    p.add_argument("--what-ifs", action="store_true",
                   help="apply the plans' what-ifs, and compare with their predictions")  # fmt: skip
    p.add_argument("--first-run", action="store_true",
                   help="use a separate cache per case, without any calibration of its draft")  # fmt: skip


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure the cases, each saved when done; the target is missed if a prediction's error is too large."""
    standard = [case for case in map(Case.parse, CASES) if case.factor in args.factors]
    cases = sorted(args.cases or standard, key=lambda case: case.factor)
    targets = {factor: Target.widened(args.model, factor) for factor in {case.factor for case in cases}}
    for factor, target in sorted(targets.items()):
        report.ceiling(f"x{factor}: files are read at {format_bytes(read_disk(args, target))}/s")
    about = {"liberties": note_unmet_limits(args, report), "command": report.command}
    record: dict[str, Any] = {}
    for case in cases:
        report.progress(f"{case}: planning, and validating with {args.prompts} prompts")
        found = run_case(args, case, targets[case.factor], about)
        show_case(found, report)
        if args.what_ifs and "error" not in found:
            again = partial(validate, args, case, targets[case.factor])
            found["what_ifs"], near = check(found["plan"], found["memory_bytes"], again, report)
            found["missed"] += [] if near else ["what_ifs"]
        record = keep(report, {"limits": LIMITS}, found)
    show(record["cases"], report)
    for kept in record["cases"]:
        if kept["missed"]:
            report.missed(f"{kept['case']}: the prediction's error is too large")
    short = [{key: value for key, value in case.items() if key not in ("rows", "plan")}
             for case in record["cases"]]  # fmt: skip
    return {**record, "cases": short}


main = Command("plan", "Predicted and measured speed of plans.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

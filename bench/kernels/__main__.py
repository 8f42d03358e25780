"""Speed of the kernels relative to the device's limits and to torch's implementations.

    python -m bench.kernels [--device cuda] [--ops tree_attention ...] [--shapes gumbel_argmax:512,128256 ...]

For each operation the minimum time is printed first: the larger of its FLOPs at the rate of a large matrix
product and its bytes at the rate of a long copy or sum. Before anything is timed it is compared with its
float64 reference at a small size, and with other implementations at the timed size.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, get_args

import torch

from bench.kernels import attention as kernels_attention
from bench.kernels import recurrence as kernels_recurrence
from bench.kernels import rows as kernels_rows
from bench.kernels.cases import Setting, Spec, filter_specs, parse_spec
from bench.kernels.run import measure
from bench.kernels.targets import CASES, check_targets
from bench.kernels.timing import Rates, device_name, find_timed_device, measure_rates, variant_of
from bench.kernels.view import show_case, show_ceiling, show_rates, show_steps
from bench.lib.cgroup import BenchError
from bench.lib.command import Command
from bench.lib.report import Report, model_name
from offspec.core.errors import RequestError
from offspec.core.values import parse_bytes
from offspec.model.devices import claim_vram
from offspec_kernels.backend import Backend, choose_backend
from offspec_kernels.errors import ArgumentError, PathError

OPS = {"tree_attention": kernels_attention.OP, **kernels_recurrence.OPS, **kernels_rows.OPS}
STEP = "draft_step"


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="cpu", help="cpu or cuda")
    p.add_argument("--vram", help="limit of a CUDA device's memory, such as 8GB")
    p.add_argument("--ops", nargs="+", choices=[*OPS, STEP], help="only these operations (default: all)")
    shapes = "; ".join(f"{name}:{','.join(op.names)}" for name, op in OPS.items())
    p.add_argument("--shapes", nargs="+", metavar="OP:SIZES[:DTYPE]", help=f"your own cases: {shapes}")
    p.add_argument("--path", choices=get_args(Backend), help="backend (default: as chosen by `backend`)")
    p.add_argument("--spread", type=float, default=1.0, help="standard deviation of attention scores")
    p.add_argument("--seconds", type=float, default=0.2, help="seconds of each of five turns")
    p.add_argument("--draft", default="demo", help="draft whose steps are timed with and without CUDA graphs")


def find_specs(args: argparse.Namespace, device: torch.device) -> list[Spec]:
    """Return the requested cases, or the device's standard cases. Raises BenchError."""
    texts = args.shapes or CASES[device.type]
    specs = filter_specs([parse_spec(text, OPS) for text in texts], args.ops)
    if not specs and STEP not in (args.ops or []):
        raise BenchError("no case remains: --ops and --shapes name different operations")
    return specs


def run_cases(
    specs: Sequence[Spec], setting: Setting, rates: Rates, seconds: float, report: Report
) -> list[dict[str, Any]]:
    """Return a row for each case, printing it when done."""
    rows = []
    for spec in specs:
        report.progress(str(spec))
        row = measure(spec, OPS[spec.op], setting, rates, seconds, lambda row: show_ceiling(row, report))
        if row["right"]:
            row = check_targets(row, setting.device.type)
        show_case(row, report)
        rows.append(row)
    return rows


def run_steps(args: argparse.Namespace, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """Time draft steps with and without CUDA graphs, if the device supports them."""
    from bench.kernels.graphs import WIDTHS, measure_graphs

    if device.type != "cuda":
        report.note("draft steps use CUDA graphs on CUDA devices only: not measured")
        return []
    report.progress(f"draft steps of {model_name(args.draft)}")
    rows = measure_graphs(args.draft, device, WIDTHS, rounds=10)
    show_steps(rows, report)
    return rows


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Check, time and report every case; a target is missed if one is wrong or too slow."""
    try:
        return _bench(args, report)
    except (ArgumentError, PathError) as error:  # the operation refuses the case
        raise RequestError(str(error)) from error


def _bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    if args.spread <= 0 or args.seconds < 0:
        raise RequestError("--spread must be above 0, and --seconds 0 or more")
    device = find_timed_device(args.device)
    choose_backend(device, args.path)
    claim_vram(device, parse_bytes(args.vram) if args.vram else None)
    specs = find_specs(args, device)
    setting = Setting(device, args.path, args.spread)
    report.progress("measuring the device's limits")
    rates = measure_rates(device, sorted({spec.dtype for spec in specs}) or ["bfloat16"])
    show_rates(rates, report)
    with torch.no_grad():
        rows = run_cases(specs, setting, rates, args.seconds, report)
    asked_for_steps = STEP in args.ops if args.ops else not args.shapes
    steps = run_steps(args, device, report) if asked_for_steps else []
    summary = {
        **report.head(args, "spread"),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "ceilings": rates.to_json(),
        "cases": rows,
        "draft": model_name(args.draft) if steps else None,
        "draft_steps": steps,
    }
    report.record(summary, device=device_name(device), variant=variant_of(device))
    report.exit_code = int(any(not row["right"] or row["missed"] for row in rows))
    return summary


main = Command("kernels", "Speed of the kernels.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

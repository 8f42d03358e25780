"""A plan held to its word: `offspec plan --replan --validate` in a memory cgroup, predicted beside measured.

    python -m bench.plan [--factors 1 2 4] [--cases x1:1GB:0 x4:least:0 x4:3GB:1] [--prompts 8]

Targets: SmolLM2-135M-Instruct as it is (x1) and widened (x2, x4; built on the first run), whose draft is the
small model in 4 bits. Every case is a process of its own in a memory cgroup of exactly the memory that it
plans for, started with an empty page cache. `least` is the smallest memory that is accepted. A run may take
some of the cases: the record keeps those of earlier runs on the same machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.lib.bandwidth import read_bandwidth
from bench.lib.cgroup import BenchError, MemoryCgroup, drop_caches
from bench.lib.report import Report, command_line, model_name
from bench.offload.__main__ import child, liberties_of
from bench.plan.cases import CASES, Case, Target
from bench.plan.record import keep
from bench.plan.view import show, show_case, show_ceiling
from offspec.checkpoint import open_checkpoint
from offspec.core.cache_dir import cache_root
from offspec.core.config import parse_bytes
from offspec.core.errors import OffspecError

NAME = "plan"
LIMITS = {"seconds_per_pass": 0.10, "tok_per_s": 0.15}  # the most that a median over prompts may be off
_ROOT = Path(__file__).parents[2]
_ROWS = (1, 16, 64, 256)


def find_ceiling(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    """What the disk gives of the target's own files, and the processor of its largest matrix."""
    config = open_checkpoint(target.model).config
    shape = ("--rows", str(config["intermediate_size"]), "--columns", str(config["hidden_size"]))
    rates = json.loads(child("bench.lib.bandwidth", *shape, "--tokens", *map(str, _ROWS)))
    return {
        "raw_bytes_per_s": raw_bandwidth(args, target),
        "gemm_flops_per_s": {str(rate["tokens"]): rate["flops_per_s"] for rate in rates},
    }


def raw_bandwidth(args: argparse.Namespace, target: Target) -> float:
    """What two threads read with O_DIRECT from the target's files just now: the better of two readings."""
    files = sorted({tensor.file for tensor in open_checkpoint(target.model).tensors.values()})
    limit = parse_bytes(args.raw_bytes)
    return max(read_bandwidth(files, limit_bytes=limit).bytes_per_s for _ in range(2))


@contextmanager
def cache_of_its_own(wanted: bool) -> Iterator[list[str]]:
    """Words before a command with which it finds the models in the user's cache, but nothing learnt."""
    if not wanted:
        yield []
        return
    with TemporaryDirectory(prefix="offspec-bench-") as folder:
        for name in ("described", "unpacked", "widened"):
            (Path(folder) / name).symlink_to(cache_root() / name)
        yield ["env", f"OFFSPEC_CACHE={folder}"]


def run(args: argparse.Namespace, memory: int, argv: Sequence[str]) -> tuple[str, dict[str, int]]:
    """A program's stdout, and the peaks of its cgroup, if there is one. Raises BenchError where it fails."""
    if not args.keep_caches:
        drop_caches()
    if not args.no_cgroup:
        with MemoryCgroup(memory) as limited:
            output = limited.run(argv, cwd=_ROOT)
        peaks = {"cgroup_peak_bytes": limited.use.peak, "cgroup_anon_peak_bytes": limited.use.anon_peak}
        return output, peaks
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
    if done.returncode:
        raise BenchError(f"the measured process failed with exit code {done.returncode}; see above")
    return done.stdout, {}


def measure(args: argparse.Namespace, case: Case, target: Target) -> dict[str, Any]:
    """Plan and validate in a process of its own: what was predicted and measured, and the plan in short."""
    memory = case.memory_bytes(target)
    asked = ("--memory", str(memory), "--temperature", f"{case.temperature:g}")
    options = ("--replan", "--validate", "--prompts", str(args.prompts), "--json", "--quiet")
    words = ["-m", "offspec", "plan", *target.words(), *asked, *options]
    raw, began = raw_bandwidth(args, target), time.perf_counter()
    with cache_of_its_own(args.first_run) as before:
        output, peaks = run(args, memory, [*before, sys.executable, *words])
    found = json.loads(output.splitlines()[-1])
    return {
        "memory_bytes": memory,
        "raw_bytes_per_s": raw,
        "seconds": time.perf_counter() - began,
        **{key: found[key] for key in ("seconds_per_pass", "tok_per_s", "tokens_per_pass", "rows")},
        "missed": [key for key, limit in LIMITS.items() if not found[key]["error"] <= limit],
        "stalled": sum(is_stalled(row) for row in found["rows"]),
        "plan": in_short(found["plan"]),
        **peaks,
    }


def is_stalled(row: dict[str, Any]) -> bool:
    """Whether the passes of a prompt took more than twice as long as predicted."""
    figure = row["seconds_per_pass"]
    return bool(figure["measured"] > 2 * figure["predicted"])


def in_short(plan: dict[str, Any]) -> dict[str, Any]:
    """What was decided and expected, less the machine, the sweep and the what-ifs."""
    keys = ("budget", "width", "draft_mode", "context", "acceptance", "placement", "costs", "forecast",
            "least_memory")  # fmt: skip
    from_disk = sum(part["bytes"] for part in plan["parts"] if part["tier"] == "disk")
    return {**{key: plan[key] for key in keys}, "disk_bytes": from_disk}


def run_case(args: argparse.Namespace, case: Case, target: Target, command: str) -> dict[str, Any]:
    """A case for the record: its figures, or the error on which it failed."""
    about = {
        "case": str(case),
        "order": [case.factor, case.temperature, case.memory != "least"],
        "model": model_name(target.model),
        "draft": target.draft if target.draft == "substitute" else f"{model_name(target.draft)} in 4 bits",
        "temperature": case.temperature,
        "prompts": args.prompts,
        "first_run": args.first_run,
        "liberties": liberties_of(args),
        "command": command,
    }
    try:
        found = measure(args, case, target)
    except BenchError as error:
        return {**about, "error": str(error), "missed": list(LIMITS)}
    about["order"].append(found["memory_bytes"])
    return {**about, **found}


def parser() -> argparse.ArgumentParser:
    """The command line of this bench."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="Plans: predicted beside measured."
    )
    p.add_argument("--model", default="demo", help="the small model (default demo)")
    p.add_argument(
        "--factors", type=int, nargs="+", default=[1, 2, 4], help="of the standard cases (default 1 2 4)"
    )
    p.add_argument("--cases", type=Case.parse, nargs="+", metavar="CASE",
                   help=f"factor:memory:temperature instead; standard are {' '.join(CASES)}")  # fmt: skip
    p.add_argument(
        "--prompts", type=int, default=8, help="to validate with; errors are of medians (default 8)"
    )
    p.add_argument("--first-run", action="store_true",
                   help="a cache of its own for each case: nothing is known of its draft")  # fmt: skip
    p.add_argument("--raw-bytes", default="2GB", help="how much is read to find the raw rate (default 2GB)")
    p.add_argument("--keep-caches", action="store_true", help="do not drop the page cache (needs no root)")
    p.add_argument("--no-cgroup", action="store_true", help="do not limit the memory (needs no root)")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    return p


def bench(args: argparse.Namespace, words: Sequence[str], report: Report) -> dict[str, Any]:
    """Measure the cases, each kept as soon as it is there; returns the record."""
    standard = [case for case in map(Case.parse, CASES) if case.factor in args.factors]
    cases = sorted(args.cases or standard, key=lambda case: case.factor)
    targets = {factor: Target.widened(args.model, factor) for factor in {case.factor for case in cases}}
    for factor, target in sorted(targets.items()):
        show_ceiling(factor, find_ceiling(args, target), report)
    if liberties_of(args):
        report.note("measured without " + " and without ".join(liberties_of(args)))
    command, record = command_line(f"bench.{NAME}", words), dict[str, Any]()
    for case in cases:
        report.progress(f"{case}: planning, and validating with {args.prompts} prompts")
        found = run_case(args, case, targets[case.factor], command)
        show_case(found, report)
        record = keep(NAME, args.json, {"limits": LIMITS}, [found])
    return record


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON. Exit code 1 where a plan is too far off."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    try:
        record = bench(args, words, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    show(record["cases"], report)
    missed = [case["case"] for case in record["cases"] if case["missed"]]
    for case in missed:
        report.note(f"{case} is off by more than it may")
    report.last_line({**record, "cases": [_without_rows(case) for case in record["cases"]]})
    return 1 if missed else 0


def _without_rows(case: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in case.items() if key not in ("rows", "plan")}


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

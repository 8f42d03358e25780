"""Child processes of a bench: helpers, and measured processes in a memory cgroup with an empty page cache."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError, MemoryCgroup, drop_caches
from bench.lib.report import Report
from offspec.core.cache_dir import make_folder
from offspec.core.values import parse_bytes

ROOT = Path(__file__).parents[2]


def log_progress(text: str) -> None:
    """Print progress of code that has no report."""
    print(text, file=sys.stderr, flush=True)


def log_notice(event: Any) -> None:
    """Print the text of an event, if it has one, as progress of a measured engine."""
    text = getattr(event, "text", None)
    if text:
        log_progress(f"  notice: {text}")


def cached_folder(folder: Path, doing: str, fill: Callable[[Path], None]) -> Path:
    """Return a folder of the user's cache, which `fill` creates on the first run. Raises DiskFullError."""
    if not folder.exists():
        log_progress(doing)
        make_folder(folder, fill, lambda: log_progress("another process is creating it"))
    return folder


def run(argv: Sequence[str], what: str) -> str:
    """Run a program and return its stdout. Raises BenchError if it fails."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise BenchError(f"{what} failed with exit code {done.returncode}; see above")
    return done.stdout


def child(module: str, *words: str) -> str:
    """Run a module as a separate process, outside the cgroup; return the last line of its stdout."""
    return run([sys.executable, "-m", module, *words], f"python -m {module}").splitlines()[-1]


def pip(*words: str, python: str = sys.executable, failure: str) -> None:
    """Run pip without dependencies. Raises BenchError with `failure` and pip's own reason."""
    command, *rest = words
    argv = [python, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps", *rest]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise BenchError(f"{failure}: {(errors or ['pip failed'])[-1].removeprefix('ERROR: ')}")


def run_measured(
    args: argparse.Namespace, argv: Sequence[str], memory: int | None = None
) -> tuple[str, dict[str, int]]:
    """Run a program in a cgroup; return the last line of its stdout, and the peaks of the cgroup.

    Args:
        args: `keep_caches` and `no_cgroup` skip what requires root; `memory` is the cgroup's limit.
        argv: The program and its arguments.
        memory: A different limit, in bytes.
    """
    if not args.keep_caches:
        drop_caches()
    if args.no_cgroup:
        output, peaks = run(argv, "the measured process"), {}
    else:
        with MemoryCgroup(parse_bytes(args.memory) if memory is None else memory) as group:
            output = group.run(argv, cwd=ROOT)
        peaks = {"cgroup_peak_bytes": group.use.peak, "cgroup_anon_peak_bytes": group.use.anon_peak}
    return (output.splitlines() or [""])[-1], peaks


def measured_argv(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a program prints, and the peaks of its cgroup."""
    line, peaks = run_measured(args, argv)
    return {**json.loads(line), **peaks}


def measured_job(args: argparse.Namespace, module: str, job: dict[str, Any]) -> dict[str, Any]:
    """Run a module on a job, both in JSON; return its result with the peaks of its cgroup."""
    return measured_argv(args, [sys.executable, "-m", module, json.dumps(job)])


def note_unmet_limits(args: argparse.Namespace, report: Report) -> list[str]:
    """Note and return the limits that do not apply to the measured processes."""
    named = ((args.no_cgroup, "a memory cgroup"), (args.keep_caches, "dropping the caches"))
    found = [name for taken, name in named if taken]
    if found:
        report.note("measured without " + " and without ".join(found))
    return found

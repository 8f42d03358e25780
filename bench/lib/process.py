"""Programs that a bench runs: beside itself, or measured, in a memory cgroup and with an empty page cache."""

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


def say(text: str) -> None:
    """Progress of what has no report."""
    print(text, file=sys.stderr, flush=True)


def say_notice(event: Any) -> None:
    """The text of an event that has one, as progress: what a measured engine has to tell."""
    text = getattr(event, "text", None)
    if text:
        say(f"  notice: {text}")


def kept(folder: Path, doing: str, fill: Callable[[Path], None]) -> Path:
    """A folder of the user's cache, which `fill` makes on the first run. Raises DiskFullError."""
    if not folder.exists():
        say(doing)
        make_folder(folder, fill, lambda: say("another process is at it"))
    return folder


def run(argv: Sequence[str], what: str) -> str:
    """Stdout of a program. Raises BenchError where it fails."""
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode:
        raise BenchError(f"{what} failed with exit code {done.returncode}; see above")
    return done.stdout


def child(module: str, *words: str) -> str:
    """Run a module as a process of its own, outside the cgroup; the last line of its stdout."""
    return run([sys.executable, "-m", module, *words], f"python -m {module}").splitlines()[-1]


def pip(*words: str, python: str = sys.executable, failure: str) -> None:
    """Run pip without dependencies. Raises BenchError with `failure` and pip's own reason."""
    command, *rest = words
    argv = [python, "-m", "pip", "--disable-pip-version-check", command, "--quiet", "--no-deps", *rest]
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise BenchError(f"{failure}: {(errors or ['pip failed'])[-1].removeprefix('ERROR: ')}")


def measured(
    args: argparse.Namespace, argv: Sequence[str], memory: int | None = None
) -> tuple[str, dict[str, int]]:
    """The last line of a program's stdout, and the peaks of its cgroup.

    Args:
        args: `keep_caches` and `no_cgroup` leave out what needs root; `memory` is the cgroup's limit.
        memory: another limit, in bytes.
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
    line, peaks = measured(args, argv)
    return {**json.loads(line), **peaks}


def measured_job(args: argparse.Namespace, module: str, job: dict[str, Any]) -> dict[str, Any]:
    """What a module prints, in JSON, of a job that it is given in JSON, with the peaks of its cgroup."""
    return measured_argv(args, [sys.executable, "-m", module, json.dumps(job)])


def tell_liberties(args: argparse.Namespace, report: Report) -> list[str]:
    """Note what the measured processes have to do without."""
    named = ((args.no_cgroup, "a memory cgroup"), (args.keep_caches, "dropping the caches"))
    found = [name for taken, name in named if taken]
    if found:
        report.note("measured without " + " and without ".join(found))
    return found

"""Speed while other processes are busy, relative to an idle machine.

    python -m bench.busy [MODEL] [--busy 2] [--rounds 3]

Linux shares processors by threads within a session, and by sessions if autogroups are on (man 7 sched). The
busy processes first run in the session of the answer, then in their own, like programs in other terminals.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import harmonic_mean

from bench.lib.command import MODEL
from bench.lib.report import Report, ratio
from bench.lib.runner import Figures, Job, Rows, comparison_bench
from offspec.core.config import SamplingParams

WANTED = 0.6  # share of the processor time that Linux leaves
_ALONE, _HERE, _APART = "alone", "in this session", "in other sessions"
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
_QUESTION = "Explain in a few sentences why the sky is blue."


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    p.add_argument("--busy", type=int, default=2, help="busy processes (default 2)")
    p.add_argument("--answers", type=int, default=10, help="answers per process; half count (default 10)")
    p.add_argument("--tokens", type=int, default=30, help="tokens per answer (default 30)")
    p.set_defaults(no_cgroup=True, keep_caches=True)


def ways(args: argparse.Namespace, report: Report) -> dict[str, Job]:
    for way in (_HERE, _APART):
        report.ceiling(f"{args.busy} busy processes {way}: {fair_share(args.busy, way):.2f} of full speed")
    job = {"model": args.model, "answers": args.answers, "tokens": args.tokens}
    return {
        way: {**job, "busy": 0 if way == _ALONE else args.busy, "apart": way == _APART}
        for way in (_ALONE, _HERE, _APART)
    }


def measure(job: Job) -> Figures:
    import offspec

    params = SamplingParams(max_tokens=job["tokens"], ignore_eos=True)
    with (
        offspec.load(job["model"], device="cpu", budget=32, width=8, learn=False) as engine,
        busy(job["busy"], job["apart"]),
    ):
        results = [engine.generate(_QUESTION, params) for _ in range(job["answers"])]
    counted = results[len(results) // 2 :]
    return {
        "tokens_per_s": harmonic_mean([result.tokens / result.seconds for result in counted]),
        "token_ids": [results[0].token_ids],
    }


@contextmanager
def busy(count: int, apart: bool) -> Iterator[None]:
    """Run busy processes until the block ends, in this session or each in a session of its own."""
    code = "import os; first = os.getppid()\nwhile os.getppid() == first: pass"  # ends with this process
    counting = [subprocess.Popen([sys.executable, "-c", code], start_new_session=apart) for _ in range(count)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def fair_share(count: int, way: str) -> float:
    """Return the share of full speed that Linux leaves to a thread on each core."""
    cores = len(os.sched_getaffinity(0))
    by_sessions = way == _APART and _AUTOGROUPS.exists() and _AUTOGROUPS.read_text() == "1\n"
    weight = cores if by_sessions else 1  # weight of a busy process, in threads of this process
    beside = (count // cores + (core < count % cores) for core in range(cores))
    return sum(1 / (1 + weight * each) for each in beside) / cores


def shortfalls(rows: Rows, args: argparse.Namespace) -> list[str]:
    missed = []
    for way, row in rows.items():
        row["of_alone"] = ratio(row["tokens_per_s"], rows[_ALONE]["tokens_per_s"])
        if way != _ALONE and row["of_alone"] < (least := WANTED * fair_share(args.busy, way)):
            missed.append(
                f"with busy processes {way}: {row['of_alone']:.2f} of full speed, less than {least:.2f}"
            )
    return missed


_COLUMNS = {"tokens_per_s": ".1f", "of_alone": ".2f"}
main = comparison_bench("busy", "Speed with other busy processes.", options, ways, _COLUMNS, shortfalls)

if __name__ == "__main__":
    sys.exit(main())

"""Answers beside other busy processes: how much of an idle machine's speed is left.

    python -m bench.busy demo --busy 1 2 4

Two engines answer the same question in turn, so that both meet the same machine: one as offspec sets itself
up, and one whose threads spin as libgomp has them by default. Each busy process counts: beside the answer in
its session, where Linux shares the processors by threads, or in a session of its own, as a program in another
terminal has, where it shares them by sessions if its autogroups are on (man 7 sched).

The ceiling is what that leaves to a thread on each core beside the busy processes, which the cores share.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.command import MODEL, Command
from bench.lib.report import Report, ratio

_BY_DEFAULT = {"GOMP_SPINCOUNT": "300000", "BENCH_SPINS": "1"}  # what libgomp takes where nothing is set
_TOKENS = 30
_AUTOGROUPS = Path("/proc/sys/kernel/sched_autogroup_enabled")
_PAUSE_S = 0.1  # for the threads of the engine that answered before to go to sleep
_WORKER = """
import os, sys
import offspec
from offspec.model.contention import Contention

if os.environ.get("BENCH_SPINS"):
    Contention.look = lambda self: None
tokens = int(sys.argv[2])
with offspec.load(sys.argv[1], device="cpu", budget=32, width=8, learn=False) as engine:
    params = offspec.SamplingParams(max_tokens=tokens, ignore_eos=True)
    print("ready", flush=True)
    for question in sys.stdin:
        print(tokens / engine.generate(question, params).seconds, flush=True)
"""


@contextmanager
def answering(model: str, variables: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process whose engine is loaded; a line on its standard input is answered with tokens a second."""
    command = [sys.executable, "-c", _WORKER, model, str(_TOKENS)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables
    )
    try:
        next_line(process)
        yield process
    finally:
        process.kill()
        process.wait()


def next_line(process: subprocess.Popen[str]) -> str:
    """What an engine says next. Raises BenchError where it has ended."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError("an engine ended before its answer")
    return line


def ask(process: subprocess.Popen[str], question: str) -> float:
    """Tokens a second of an answer."""
    assert process.stdin is not None
    process.stdin.write(question + "\n")
    process.stdin.flush()
    return float(next_line(process))


@contextmanager
def busy(count: int, apart: bool) -> Iterator[None]:
    """So many processes that count, in this session or each in one of its own."""
    code = "import os; first = os.getppid()\nwhile os.getppid() == first: pass"  # until this process ends
    command = [sys.executable, "-c", code]
    counting = [subprocess.Popen(command, start_new_session=apart) for _ in range(count)]
    try:
        yield
    finally:
        for process in counting:
            process.kill()
            process.wait()


def measure(engines: Sequence[subprocess.Popen[str]], rounds: int) -> list[float]:
    """Tokens a second of each engine, asked in turn; the first half of the rounds is not counted."""
    question = "Explain in a few sentences why the sky is blue."
    speeds = [list[float]() for _ in engines]
    for turn in range(2 * rounds):
        order = list(enumerate(engines))
        for index, engine in order if turn % 2 else order[::-1]:  # the first may find a cold cache
            time.sleep(_PAUSE_S)
            speeds[index].append(ask(engine, question))
    return [statistics.harmonic_mean(each[rounds:]) for each in speeds]


def fair_share(cores: int, count: int, by_sessions: bool) -> float:
    """What is left of the speed alone to a thread on each core beside so many busy processes."""
    weight = cores if by_sessions else 1  # of a busy process, in threads of ours
    beside = (count // cores + (core < count % cores) for core in range(cores))
    return sum(1 / (1 + weight * each) for each in beside) / cores


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    p.add_argument("--busy", type=int, nargs="*", default=[1, 2, 4], help="counts of busy processes")
    p.add_argument("--rounds", type=int, default=6, help="answers of each engine that count")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure and tell."""
    cores = len(os.sched_getaffinity(0))
    grouped = _AUTOGROUPS.exists() and _AUTOGROUPS.read_text() == "1\n"
    rows: list[dict[str, Any]] = []
    with answering(args.model, {}) as ours, answering(args.model, _BY_DEFAULT) as spinning:
        for count, apart in ((0, False), *product(args.busy, (False, True))):
            where = "in other sessions" if apart else "in this session"
            report.progress(f"beside {count} busy processes {where}")
            with busy(count, apart):
                speed, default = measure((ours, spinning), args.rounds)
            row = {"busy": count, "apart": apart, "tok_per_s": speed, "tok_per_s_spinning": default}
            rows.append(row)
            alone = rows[0]
            fair = fair_share(cores, count, apart and grouped)
            row |= {"fair_share": fair, "of_alone": ratio(speed, alone["tok_per_s"])}
            row["spinning_of_alone"] = ratio(default, alone["tok_per_s_spinning"])
            report.ceiling(f"beside {count} busy processes {where}: {fair:.2f} of the speed alone")
            report.reached(f"{speed:.1f} tok/s", row["of_alone"])
            report.note(f"spinning: {default:.1f} tok/s, {row['spinning_of_alone']:.2f} of alone")
    lost = 1 - ratio(alone["tok_per_s"], alone["tok_per_s_spinning"])
    report.note(f"lost on an idle machine: {lost:.1%}")
    summary = {**report.head(args), "rows": rows, "lost_alone": lost}
    report.record(summary)
    return summary


main = Command("busy", "Answers beside other busy processes.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

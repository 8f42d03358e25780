"""Leaks under mixed use: short requests, chats, cancellations and reloads of a tiny model.

    python -m bench.soak [REQUESTS] [--reload 500]

Prints memory, threads and open files, and their growth per thousand requests: the slope of a line through the
second half of the readings. A leak is a slope that does not shrink with longer runs.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from random import Random
from statistics import linear_regression
from typing import TYPE_CHECKING

from bench.lib.process import log_progress
from bench.lib.report import Report
from bench.lib.runner import Figures, Job, Rows, comparison_bench
from offspec.core.config import SamplingParams
from offspec.core.memory import resident_bytes

if TYPE_CHECKING:
    from offspec import Engine

WANTED = {"resident_mb": 0.5, "threads": 0.01, "files": 0.01}  # maximum growth per thousand requests
_TOKENS, _SEQUENCES, _READINGS = 6, 4, 20


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("requests", type=int, nargs="?", default=20_000)
    p.add_argument("--reload", type=int, default=500, help="requests between two loads (default 500)")
    p.add_argument("--seed", type=int, default=0)
    p.set_defaults(no_cgroup=True, keep_caches=True)


def ways(args: argparse.Namespace, report: Report) -> dict[str, Job]:
    report.ceiling("per thousand requests at most " + ", ".join(f"{WANTED[key]:g} {key}" for key in WANTED))
    return {"growth": {"requests": args.requests, "reload": args.reload, "seed": args.seed}}


def measure(job: Job) -> Figures:
    import offspec
    from tests.support.tiny_models import write_model

    random, readings, done = Random(job["seed"]), list[dict[str, float]](), 0
    every = max(job["requests"] // _READINGS, 1)
    with tempfile.TemporaryDirectory(prefix="offspec-soak-") as folder:
        model = write_model(Path(folder) / "model", num_hidden_layers=2, spread=0.2)
        while done < job["requests"]:
            with offspec.load(
                str(model), device="cpu", memory="2GB", draft="lookup", budget=4, width=2, context=256,
                sequences=_SEQUENCES, learn=False,
            ) as engine:  # fmt: skip
                until = min(done + job["reload"], job["requests"])
                while done < until:
                    done += use(engine, random)
                    if done // every > len(readings):
                        readings.append(read_process(done))
                        log_progress("  ".join(f"{value:g} {key}" for key, value in readings[-1].items()))
    return {**slopes(readings), "readings": readings}


def read_process(requests: int) -> dict[str, float]:
    """Return the resources of this process after `requests` requests."""
    gc.collect()
    return {
        "requests": requests,
        "resident_mb": resident_bytes() / 1e6,
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def slopes(readings: list[dict[str, float]]) -> dict[str, float]:
    """Return the growth of each figure per thousand requests, over the second half of the readings."""
    late = readings[len(readings) // 2 :]
    at = [reading["requests"] / 1000 for reading in late]
    return {key: round(linear_regression(at, [reading[key] for reading in late]).slope, 3) for key in WANTED}


def use(engine: Engine, random: Random) -> int:
    """Use the engine in one of several ways, chosen at random; return the number of requests."""
    from offspec import RequestError, TextDelta

    temperature, seed = random.choice((0.0, 1.0)), random.randrange(9)
    params = SamplingParams(temperature, max_tokens=_TOKENS, seed=seed)
    text = " ".join(f"w{random.randrange(3, 90)}" for _ in range(random.randint(1, 12)))
    way = random.randrange(4)
    if way == 0:
        engine.generate(text, params, raw=True)
        return 1
    if way == 1:
        session = engine.chat(params=params)
        for _ in range(2):
            list(session.send(text))
        session.close()
        return 2
    if way == 2:  # abandoned in the middle
        for event in engine.stream(text, params, raw=True):
            if isinstance(event, TextDelta):
                break
        return 1
    answers = [engine.submit(f"{text} w{number}", params, raw=True) for number in range(_SEQUENCES)]
    left = answers[random.randrange(_SEQUENCES)]
    left.cancel()
    for each in answers:
        with suppress(RequestError) if each is left else nullcontext():  # it may still be queued
            each.result()
    return _SEQUENCES


def shortfalls(rows: Rows, args: argparse.Namespace) -> list[str]:
    (row,) = rows.values()
    return [f"{row[key]:g} {key} of growth per thousand requests" for key in WANTED if row[key] > WANTED[key]]


main = comparison_bench(
    "soak", "A day of use in minutes", options, ways, dict.fromkeys(WANTED, ".3f"), shortfalls
)

if __name__ == "__main__":
    sys.exit(main())

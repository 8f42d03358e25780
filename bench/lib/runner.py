"""Benches that compare ways of asking an engine: each way in a measured process, in turns, then one table.

Such a bench is a module with options, `ways` and `measure`; see `bench/sequences.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from bench.lib.command import Command, printed_job, shared
from bench.lib.process import measured_job, tell_liberties
from bench.lib.report import Report, as_recorded, grid, ratio
from bench.lib.streamed import layer_files, raw_bandwidth, widened
from bench.lib.widen import read_recipe
from offspec_planners.units import format_bytes

Job = dict[str, Any]  # in JSON; with `files`, the rate of the disk is measured before each process
Figures = dict[str, Any]
Rows = dict[str, Figures]  # by the name of the way


def comparing(
    name: str,
    description: str,
    options: Callable[[argparse.ArgumentParser], None],
    ways: Callable[[argparse.Namespace, Report], dict[str, Job]],
    columns: Mapping[str, str],
    shortfalls: Callable[[Rows, argparse.Namespace], list[str]],
) -> Command:
    """The `main` of the bench `bench.NAME`, whose `measure(job)` runs in the measured process.

    Args:
        name: Of its module below `bench`, and of its record.
        description: For --help.
        options: Adds what only this bench has.
        ways: Prints the ceilings; the job of each way.
        columns: Formats of the figures in the table.
        shortfalls: Sentences on aims that were missed; may add figures to the rows.
    """

    def all_options(p: argparse.ArgumentParser) -> None:
        options(p)
        p.add_argument("--rounds", type=int, default=1, help="processes of each way, in turns (default 1)")

    def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
        jobs = ways(args, report)
        liberties = tell_liberties(args, report)
        runs = in_turns(name, jobs, args, report)
        rows = {way: tally(found) for way, found in runs.items()}
        missed = [*differences(runs), *shortfalls(rows, args)]
        view = grid(description, "", *columns)
        for way, row in rows.items():
            view.add_row(way, *(f"{row[key]:{form}}" if key in row else "-" for key, form in columns.items()))
        report.out.print(view)
        for text in missed:
            report.missed(text)
        summary = {
            "bench": name,
            **{key: as_recorded(value) for key, value in vars(args).items() if not isinstance(value, Path)},
            "liberties": liberties,
            "shortfalls": missed,
            "runs": [{"way": way, **row} for way, row in rows.items()],
        }
        report.record(summary, processes=runs)
        return summary

    return Command(name, description, all_options, bench)


def in_turns(
    name: str, jobs: dict[str, Job], args: argparse.Namespace, report: Report
) -> dict[str, list[Figures]]:
    """The processes of each way; the order turns with each round."""
    runs = {way: list[Figures]() for way in jobs}
    for turn in range(args.rounds):
        for way in list(jobs) if turn % 2 == 0 else reversed(jobs):
            job, disk = jobs[way], {}
            if files := job.get("files"):
                disk = {"raw_bytes_per_s": raw_bandwidth(args, map(Path, files)).bytes_per_s}
            report.progress(f"round {turn + 1} of {args.rounds}: {way}")
            runs[way].append({**measured_job(args, "bench.lib.runner", {"bench": name, **job}), **disk})
    return runs


def tally(runs: list[Figures]) -> Figures:
    """Medians of numbers; anything else as it was last. Without `token_ids`."""
    return {
        key: median(run[key] for run in runs) if isinstance(value, int | float) else value
        for key, value in runs[-1].items()
        if key != "token_ids"
    }


def differences(runs: Mapping[str, list[Figures]]) -> list[str]:
    """A sentence for each way whose `token_ids` are not those of the first way, as far as both go."""
    told = [(way, run["token_ids"]) for way, found in runs.items() for run in found if "token_ids" in run]
    different = [
        way
        for way, answers in told
        for ids, expected in zip(answers, told[0][1], strict=False)
        if any(a != b for a, b in zip(ids, expected, strict=False))
    ]
    return [f"answers differ from those of {told[0][0]}: {way}" for way in dict.fromkeys(different)]


def streamed_options(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Options of a bench that streams the widened model."""
    shared(p, "model", "factor", "target", "engine_memory", "dtype", "seed", "keep_caches", "no_cgroup")
    shared(p, **{"memory": "1.5GB", "raw_bytes": "1GB", **defaults})


def streamed(args: argparse.Namespace, report: Report) -> tuple[Path, list[str]]:
    """The widened model and the files of its layers; the time that the disk needs for them is printed."""
    folder = widened(args)
    recipe = read_recipe(folder)
    files = layer_files(folder, recipe)
    rate = raw_bandwidth(args, files).bytes_per_s
    report.ceiling(
        f"{ratio(recipe['layer_bytes'], rate):.2f} s a pass from the disk: "
        f"{format_bytes(recipe['layer_bytes'])} of layers at {format_bytes(rate)}/s"
    )
    return folder, [str(file) for file in files]


def settings(args: argparse.Namespace, target: Path | str, **more: Any) -> dict[str, Any]:
    """Arguments of `offspec.load` for a target in the memory of the bench."""
    memory = args.engine_memory or args.memory
    return {"model": str(target), "memory": memory, "dtype": args.dtype, "device": "cpu", **more}


def work(job: Job) -> Figures:
    """Figures of a job, by the bench that it names."""
    found: Figures = import_module(f"bench.{job['bench']}").measure(job)
    return found


if __name__ == "__main__":
    sys.exit(printed_job(work))

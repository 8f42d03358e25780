"""Benches that compare several ways to use an engine: measured processes in turn, then one table.

Such a bench is a module with `options`, `ways` and `measure`; see `bench/sequences.py`.
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
from bench.lib.process import measured_job, note_unmet_limits
from bench.lib.report import Report, as_recorded, grid, ratio
from bench.lib.streamed import layer_files, raw_bandwidth, widened_model
from bench.lib.widen import read_recipe
from offspec_planners.units import format_bytes

Job = dict[str, Any]  # as JSON; if it has `files`, the disk rate is measured before each process
Figures = dict[str, Any]
Rows = dict[str, Figures]  # by the name of the way


def comparison_bench(
    name: str,
    description: str,
    options: Callable[[argparse.ArgumentParser], None],
    ways: Callable[[argparse.Namespace, Report], dict[str, Job]],
    columns: Mapping[str, str],
    shortfalls: Callable[[Rows, argparse.Namespace], list[str]],
) -> Command:
    """Return the `main` of the bench `bench.NAME`, whose `measure(job)` runs in the measured process.

    Args:
        name: Name of its module below `bench` and of its record.
        description: Text for --help.
        options: Adds the options that only this bench has.
        ways: Prints the ceilings; returns the job of each way.
        columns: Formats of the figures in the table.
        shortfalls: Returns sentences on missed targets; may add figures to the rows.
    """

    def all_options(p: argparse.ArgumentParser) -> None:
        options(p)
        p.add_argument("--rounds", type=int, default=1, help="processes of each way, alternating (default 1)")

    def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
        jobs = ways(args, report)
        liberties = note_unmet_limits(args, report)
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
    """Run the processes of each way; the order rotates with each round."""
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
    """Return medians of numbers, and the last value of anything else except `token_ids`."""
    return {
        key: median(run[key] for run in runs) if isinstance(value, int | float) else value
        for key, value in runs[-1].items()
        if key != "token_ids"
    }


def differences(runs: Mapping[str, list[Figures]]) -> list[str]:
    """Return a sentence per way whose `token_ids` differ from the first way's, up to the shorter length."""
    answers_by_way = [
        (way, run["token_ids"]) for way, found in runs.items() for run in found if "token_ids" in run
    ]
    different = [
        way
        for way, answers in answers_by_way
        for ids, expected in zip(answers, answers_by_way[0][1], strict=False)
        if any(a != b for a, b in zip(ids, expected, strict=False))
    ]
    return [f"answers differ from those of {answers_by_way[0][0]}: {way}" for way in dict.fromkeys(different)]


def streamed_options(p: argparse.ArgumentParser, **defaults: Any) -> None:
    """Add the options of a bench that streams the widened model."""
    shared(p, "model", "factor", "target", "engine_memory", "dtype", "seed", "keep_caches", "no_cgroup")
    shared(p, **{"memory": "1.5GB", "raw_bytes": "1GB", **defaults})


def prepare_streamed(args: argparse.Namespace, report: Report) -> tuple[Path, list[str]]:
    """Prepare the widened model and print its read time; return its folder and the files of its layers."""
    folder = widened_model(args)
    recipe = read_recipe(folder)
    files = layer_files(folder, recipe)
    rate = raw_bandwidth(args, files).bytes_per_s
    report.ceiling(
        f"{ratio(recipe['layer_bytes'], rate):.2f} s per pass from the disk: "
        f"{format_bytes(recipe['layer_bytes'])} of layers at {format_bytes(rate)}/s"
    )
    return folder, [str(file) for file in files]


def settings(args: argparse.Namespace, target: Path | str, **more: Any) -> dict[str, Any]:
    """Return the arguments of `offspec.load` for a target with the memory of the bench."""
    memory = args.engine_memory or args.memory
    return {"model": str(target), "memory": memory, "dtype": args.dtype, "device": "cpu", **more}


def work(job: Job) -> Figures:
    """Return the figures of a job, measured by the bench that it names."""
    found: Figures = import_module(f"bench.{job['bench']}").measure(job)
    return found


if __name__ == "__main__":
    sys.exit(printed_job(work))

"""How long it takes to find the best static tree, by the kind of acceptance that it is found for."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.lib.command import Command
from bench.lib.report import Report
from offspec_planners.sequoia import best_tree_shape

HEAP_SECONDS, PROGRAMME_SECONDS = 0.05, 1.0  # what is wanted at 2048 nodes, 24 levels and 32 children

Acceptance = NDArray[np.float64]
Kind = Callable[[np.random.Generator, int, int], Acceptance]


def _typical(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    """What drafts show: the first guess often right, then a long tail."""
    row = 0.6 * 0.5 ** np.arange(ranks) + 0.2 / np.arange(1, ranks + 1) ** 1.5
    return np.tile(row / (1.05 * row.sum()), (depths, 1))


def _counted(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    """The same as it is measured, from 300 nodes a depth: here and there a later rank has the better luck."""
    return np.minimum(random.poisson(300 * _typical(random, depths, ranks)) / 300, 1.0)


def _uneven(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    return random.dirichlet(np.ones(ranks), depths)


def _flat(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    return (1 + 0.1 * random.random((depths, ranks))) / (1.1 * ranks)


def _powers(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    return random.random((depths, ranks)) ** random.integers(1, 9, (depths, 1))


def _rising(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    """The last guess is the best one, at all depths: nothing that happens, and hardest to bound."""
    return np.sort(_uneven(random, depths, ranks), axis=1)


def _last(random: np.random.Generator, depths: int, ranks: int) -> Acceptance:
    table = np.zeros((depths, ranks))
    table[:, -1] = 0.9
    return table


FALLING: dict[str, Kind] = {
    "typical": _typical,
    "uneven, sorted": lambda random, depths, ranks: -np.sort(-_uneven(random, depths, ranks), axis=1),
    "all alike": lambda random, depths, ranks: np.full((depths, ranks), 1 / ranks),
}
RISING: dict[str, Kind] = {
    "typical, counted": _counted,
    "uneven": _uneven,
    "nearly alike": _flat,
    "powers": _powers,
    "rising": _rising,
    "only the last": _last,
}


def measure(kind: Kind, args: argparse.Namespace) -> dict[str, float]:
    """Seconds to find and trace the tree: median and most over the seeds, each the best of its repeats."""
    found, expected = [], []
    for seed in range(args.seeds):
        table = kind(np.random.default_rng(seed), args.depth, args.children)
        times = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            shape = best_tree_shape(table, args.nodes, args.depth)
            times.append(time.perf_counter() - start)
        found.append(min(times))
        expected.append(shape.expected)
    return {
        "median_seconds": statistics.median(found),
        "most_seconds": max(found),
        "expected_tokens": statistics.median(expected),
    }


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--nodes", type=int, default=2048)
    p.add_argument("--depth", type=int, default=24)
    p.add_argument("--children", type=int, default=32)
    p.add_argument("--seeds", type=int, default=3, help="tables of each kind")
    p.add_argument("--repeats", type=int, default=3, help="times that each is solved; the best counts")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Solve tables of every kind and tell."""
    report.ceiling(f"{HEAP_SECONDS * 1e3:.0f} ms by the heap, {PROGRAMME_SECONDS:.0f} s by the programme")
    results: dict[str, dict[str, Any]] = {}
    view = Table("acceptance by rank", "solver", "ms, median", "ms, most", "expected tokens")
    for solver, kinds, wanted in (("heap", FALLING, HEAP_SECONDS), ("programme", RISING, PROGRAMME_SECONDS)):
        for name, kind in kinds.items():
            report.progress(f"{solver}: {name}")
            found = measure(kind, args)
            results[name] = {"solver": solver, **found}
            times = [f"{1e3 * found[key]:.1f}" for key in ("median_seconds", "most_seconds")]
            view.add_row(name, solver, *times, f"{found['expected_tokens']:.3f}")
        most = max(results[name]["most_seconds"] for name in kinds)
        report.reached(f"{1e3 * most:.1f} ms by the {solver} at most", most / wanted)
    report.out.print(view)
    summary = {**report.head(args, "nodes", "depth", "children", "seeds"), "kinds": results}
    report.record(summary)
    return summary


main = Command("sequoia", "How long it takes to find the best static tree.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

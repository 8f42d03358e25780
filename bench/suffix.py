"""What guessing from texts costs: to catch up, to grow a subtree and to learn, by the length of the history.

    python -m bench.suffix [--history 8192 32768 131072]

The text is made up: fresh passages with tokens as frequent as words are, and copies of earlier ones in which
a token is changed now and then. A source knows the history and then goes through the rest as if a target
spoke it: it catches up, drafts a subtree of up to 64 nodes, and learns how far it held. With noise the text
is the same, so that what is accepted tells nothing; it is the cost that counts. Times are the thread's own,
so that a busy machine does not count.

The floor is what a pass takes if nothing is done but to look up, in a dictionary as large as the history,
each new token, each node of the subtree and each token that is learnt.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from bench.lib.command import Command
from bench.lib.report import Report, ratio

if TYPE_CHECKING:
    from offspec.draft.base import Lookup
    from offspec.draft.growing_tree import Subtree
    from offspec.sampling.noise import GumbelNoise

WANTED_SECONDS = 1e-3  # of a pass, on the average
WANTED_HISTORY = 32768
_VOCABULARY = 49152
_FLOOR = math.log(0.02)  # the least likely guess that the engine asks for


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds of one pass, by part, the tokens that it brought, and the nodes of its subtree."""

    start: float
    below: float
    learn: float
    tokens: int
    nodes: int

    @property
    def seconds(self) -> float:
        return self.start + self.below + self.learn

    @property
    def steps(self) -> int:
        """Lookups that the floor counts."""
        return 2 * self.tokens + self.nodes


def make_text(length: int, seed: int = 0, copied: float = 0.88, changed: float = 0.02) -> list[int]:
    """Tokens of which a share is copied from earlier ones, in passages of 40 to 200."""
    rng = random.Random(seed)
    weights = [1.0 / (rank + 3) for rank in range(_VOCABULARY)]
    text = rng.choices(range(_VOCABULARY), weights, k=min(length, 500))
    while len(text) < length:
        size = rng.randint(40, 200)
        fresh = rng.choices(range(_VOCABULARY), weights, k=max(1, round(size * (1 - copied) / copied)))
        begin = rng.randrange(len(text) - size)
        passage = [
            rng.randrange(_VOCABULARY) if rng.random() < changed else token
            for token in text[begin : begin + size]
        ]
        text += fresh + passage
    return text[:length]


def accepted(subtree: Subtree, tokens: Sequence[int]) -> int:
    """How many of the tokens to come the subtree holds, one below the other."""
    children = {pair: node for node, pair in enumerate(zip(subtree.parent, subtree.token, strict=True))}
    node = -1
    for count, token in enumerate(tokens):
        found = children.get((node, token))
        if found is None:
            return count
        node = found
    return len(tokens)


def replay(
    lookup: Lookup,
    text: Sequence[int],
    history: int,
    noise: GumbelNoise | None,
    nodes: int,
    clock: Callable[[], float] = time.thread_time,
) -> list[PassCost]:
    """The passes over a text, behind a history that the source has seen."""
    ids = list(text[:history])
    lookup.start(ids)
    costs = []
    while len(ids) < len(text):
        began = clock()
        lookup.start(ids)
        started = clock()
        subtree = lookup.below([], noise, nodes, _FLOOR, nodes)
        grown = clock()
        held = accepted(subtree, text[len(ids) :])
        tokens = list(text[len(ids) : len(ids) + held + 1])
        learning = clock()
        lookup.learn(tokens)
        learnt = clock() - learning
        ids += tokens
        costs.append(PassCost(started - began, grown - started, learnt, len(tokens), len(subtree.token)))
    return costs


def dictionary_step(entries: int) -> float:
    """Seconds of a lookup in a dictionary of so many entries; the best of a few."""
    table = {key: key for key in range(entries)}
    keys = random.Random(0).choices(range(entries), k=20_000)
    times = []
    for _ in range(5):
        began = time.thread_time()
        for key in keys:
            table[key]
        times.append(time.thread_time() - began)
    return min(times) / len(keys)


def tally(costs: Sequence[PassCost], step: float) -> dict[str, Any]:
    """Means over the passes, beside what the dictionary steps alone take."""
    seconds = [cost.seconds for cost in costs]
    floor = step * fmean(cost.steps for cost in costs)
    return {
        "passes": len(costs),
        "tokens_per_pass": fmean(cost.tokens for cost in costs),
        "nodes": fmean(cost.nodes for cost in costs),
        "seconds": fmean(seconds),
        **{
            f"{part}_seconds": fmean(getattr(cost, part) for cost in costs)
            for part in ("start", "below", "learn")
        },
        "p99_seconds": sorted(seconds)[int(0.99 * len(seconds))],
        "floor_seconds": floor,
        "of_floor": ratio(floor, fmean(seconds)),
    }


def measure(args: argparse.Namespace, history: int) -> list[dict[str, Any]]:
    """Both sources behind one history, without noise and with it."""
    from offspec.draft.lookup.ngram import NgramLookup
    from offspec.draft.lookup.suffix import SuffixLookup
    from offspec.sampling.noise import GumbelNoise

    text, step = make_text(history + args.tokens), dictionary_step(history)
    rows = []
    for kind in (SuffixLookup, NgramLookup):
        for noise in (None, GumbelNoise(0, _VOCABULARY)):
            lookup: Lookup = kind()
            costs = replay(lookup, text, history, noise, args.nodes)
            lookup.close()
            row = {"source": lookup.name, "history": history, "temperature": 0.0 if noise is None else 1.0}
            rows.append(row | tally(costs, step))
    return rows


def too_slow(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the suffix source at the history in question that take longer than they may."""
    return [
        row
        for row in rows
        if row["source"] == "suffix" and row["history"] <= WANTED_HISTORY and row["seconds"] > WANTED_SECONDS
    ]


def show(row: dict[str, Any], report: Report) -> None:
    parts = ", ".join(f"{part} {1e6 * row[f'{part}_seconds']:.0f}" for part in ("start", "below", "learn"))
    report.reached(
        f"{row['source']}, {row['history']:,} tokens, temperature {row['temperature']:.0f}: "
        f"{1e6 * row['seconds']:.0f} µs a pass ({parts}), floor {1e6 * row['floor_seconds']:.1f}, "
        f"p99 {1e6 * row['p99_seconds']:.0f}; {row['tokens_per_pass']:.1f} tokens, {row['nodes']:.0f} nodes",
        row["of_floor"],
    )


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("--history", type=int, nargs="+", default=[8192, WANTED_HISTORY, 131072])
    p.add_argument("--tokens", type=int, default=4000, help="that the passes go through")
    p.add_argument("--nodes", type=int, default=64, help="most nodes of a subtree")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure behind every history and tell; short of its aim where the automaton takes too long."""
    step = dictionary_step(max(args.history))
    report.ceiling(f"{1e9 * step:.0f} ns a dictionary step; wanted is {1e6 * WANTED_SECONDS:.0f} µs a pass")
    rows = []
    for history in args.history:
        report.progress(f"{history:,} tokens of history")
        for row in measure(args, history):
            rows.append(row)
            show(row, report)
    slow = too_slow(rows)
    summary = {**report.head(args, "nodes"), "rows": rows, "too_slow": len(slow)}
    report.record(summary)
    report.exit_code = int(bool(slow))
    return summary


main = Command("suffix", "What lookups cost a pass.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

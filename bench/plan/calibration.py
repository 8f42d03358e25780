"""Whether scores mean what they say: tokens that trees promised against tokens that passes gave.

    python -m bench.plan.calibration [MODEL] [--prompts N] [--temperatures 0 0.6 1.0]

A node's score is the log of the probability that the target takes the path to it. Conditional: how often a
node was picked where its parent was walked, by the tenth that its probability given the parent lies in.
Path: how often a node was reached, by the tenth of its path's probability. The sum of the latter over a tree
is the tokens that its pass is expected to give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from bench.lib.command import MODEL, Command, shared
from bench.lib.drafting import always_drafting
from bench.lib.plots import calibration_plot
from bench.lib.report import Prompt, Report, grid, model_name, ratio, read_prompts

WANTED = 0.1  # expected tokens per pass may be off by this share
_TENTHS = 10


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: what its tree promised and what came of it.

    expected, observed: tokens. conditional, path: pairs of probability and outcome (0 or 1), one for each
    node whose outcome is known, [n, 2].
    """

    expected: float
    observed: int
    conditional: NDArray[np.float64]
    path: NDArray[np.float64]


def look_at(done: Any) -> Pass:
    """What a `PassResult` says of its tree's scores.

    Where the text ended at a node of the tree, nothing is known of what is below it.
    """
    tree, walk = done.grown.tree, done.walk
    reached = np.zeros(len(tree), np.bool_)
    reached[list(walk.nodes)] = True
    ended_at = tree.children(walk.nodes[-1]).get(walk.tokens[-1])
    known, counted = np.ones(len(tree), np.bool_), np.ones(len(tree), np.bool_)
    if ended_at is not None:
        reached[ended_at] = True
        known = tree.depth <= len(walk.tokens)
        counted = tree.depth < len(walk.tokens)
    known[0] = False  # the root is no guess
    decided = np.isin(tree.parent, walk.nodes)
    given_parent = np.exp(tree.score - tree.score[np.maximum(tree.parent, 0)])
    return Pass(
        expected=float(np.exp(tree.score[counted]).sum()),
        observed=len(walk.tokens),
        conditional=np.stack([given_parent, reached], axis=1)[decided],
        path=np.stack([np.exp(tree.score), reached], axis=1)[known],
    )


@contextmanager
def watching(engine: Any) -> Iterator[list[Pass]]:
    """The passes of an engine, as they happen."""
    passes: list[Pass] = []
    run = engine._passes._run

    def watched(*given: Any) -> Any:
        found = run(*given)
        passes.extend(look_at(done) for done in found if done is not None and done.grown.steps)
        return found

    with patch.object(engine._passes, "_run", watched):
        yield passes


def tenths(pairs: NDArray[np.float64]) -> list[dict[str, float]]:
    """Mean probability and share of hits in each tenth of the probabilities of pairs [n, 2]."""
    place = np.minimum((pairs[:, 0] * _TENTHS).astype(int), _TENTHS - 1)
    rows = []
    for tenth in range(_TENTHS):
        inside = pairs[place == tenth]
        expected, hits = inside.sum(axis=0) if len(inside) else (0.0, 0.0)
        rows.append(
            {
                "from": tenth / _TENTHS,
                "nodes": len(inside),
                "expected": ratio(float(expected), len(inside)),
                "observed": ratio(float(hits), len(inside)),
            }
        )
    return rows


def measure(args: argparse.Namespace, prompts: Sequence[Prompt], report: Report) -> dict[str, Any]:
    """Answer every prompt at every temperature, and add the passes up."""
    import offspec
    from offspec.core.config import SamplingParams

    runs = []
    with offspec.load(
        args.model, draft=args.draft, device="cpu", dtype=args.dtype, budget=args.budget, width=args.width
    ) as engine:
        always_drafting(engine)
        for temperature in args.temperatures:
            with watching(engine) as passes:
                for number, prompt in enumerate(prompts):
                    params = SamplingParams(
                        temperature=temperature, seed=args.seed + number, max_tokens=args.tokens
                    )
                    engine.generate(prompt.prompt, params)
                    report.progress(f"T {temperature:g}  {prompt.id:<12} {told(passes)}")
            runs.append({"temperature": temperature, **summarise(passes)})
        draft = engine.draft
    return {
        **report.head(args, "dtype", "tokens", "budget", "width", "seed"),
        "model": model_name(args.model),
        "draft": draft,
        "prompts": len(prompts),
        "runs": runs,
    }


def summarise(passes: Sequence[Pass]) -> dict[str, Any]:
    """Tokens per pass and the tenths of some passes. scatter: standard error of the observed mean."""
    expected, observed = (sum(getattr(p, key) for p in passes) for key in ("expected", "observed"))
    return {
        "passes": len(passes),
        "expected": ratio(expected, len(passes)),
        "observed": ratio(observed, len(passes)),
        "scatter": ratio(float(np.std([p.observed for p in passes])), len(passes) ** 0.5) if passes else 0.0,
        "ratio": ratio(expected, observed),
        "conditional": tenths(np.concatenate([np.empty((0, 2)), *(p.conditional for p in passes)])),
        "path": tenths(np.concatenate([np.empty((0, 2)), *(p.path for p in passes)])),
    }


def told(passes: Sequence[Pass]) -> str:
    """The figures so far in a few words."""
    all_of = summarise(passes)
    return (
        f"{all_of['expected']:.2f} tokens a pass expected, {all_of['observed']:.2f} observed, "
        f"{all_of['passes']} passes"
    )


def table(summary: dict[str, Any], kind: str) -> Table:
    """Rows: tenths. Columns: nodes, expected and observed for each temperature."""
    heads = [
        head for run in summary["runs"] for head in (f"T {run['temperature']:g}", "expected", "observed")
    ]
    view = grid(f"nodes of trees, and how often they are taken, {TITLES[kind]}", "probability", *heads)
    for tenth in range(_TENTHS):
        cells = [f"{tenth / _TENTHS:.1f}–{(tenth + 1) / _TENTHS:.1f}"]
        for run in summary["runs"]:
            row = run[kind][tenth]
            cells += [str(row["nodes"]), f"{row['expected']:.3f}", f"{row['observed']:.3f}"]
        view.add_row(*cells)
    return view


TITLES = {"conditional": "where the parent was walked", "path": "from the root"}


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "prompts", "tokens", "budget", "dtype", "seed", width=16, temperatures=[0.0, 0.6, 1.0])
    p.add_argument("--draft", default="substitute", help="substitute (default), or a model")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Measure and tell, promised beside observed."""
    prompts = read_prompts(args.prompts)
    report.ceiling("1.00 expected tokens for each observed one, at every temperature")
    summary = measure(args, prompts, report)
    for run in summary["runs"]:
        text = f"T {run['temperature']:g}: {run['expected']:.2f} tokens a pass expected, "
        text += f"{run['observed']:.2f} ± {run['scatter']:.2f} observed in {run['passes']} passes"
        report.reached(text, run["ratio"])
    off = max(abs(run["ratio"] - 1) for run in summary["runs"])
    report.note(f"off by {off:.1%} at most; {WANTED:.0%} is wanted")
    for kind in TITLES:
        report.out.print(table(summary, kind))
    report.record(summary)
    report.note(calibration_plot(summary["runs"], TITLES, report.file(suffix=".svg")))
    return summary


main = Command(
    "calibration", "Expected against observed acceptance.", options, bench, module="plan.calibration"
)

if __name__ == "__main__":
    sys.exit(main())

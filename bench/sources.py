"""Tokens per pass by source of guesses, each alone and several in one tree.

    python -m bench.sources [MODEL] --alone substitute suffix lookup HEAD … --mixed substitute,suffix …

Asked are the prompts of all kinds, and besides them some whose answers copy long passages of what was said.
Budget and width of trees are the same for all. A mixture is compared with the best of its own sources, kind
by kind.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from rich.table import Table

from bench.acceptance import Answer, ask, opened, yield_of
from bench.lib.command import MODEL, Command, shared
from bench.lib.plots import sources_plot
from bench.lib.report import PROMPTS, Prompt, Report, grid, model_name, ratio, read_prompts
from offspec.core.config import SamplingParams

COPIES = PROMPTS / "copy"


def label(sources: str) -> str:
    """Sources as results name them: folders without what leads to them."""
    return " + ".join(model_name(source) for source in sources.split(","))


def prompts_of(args: argparse.Namespace) -> list[Prompt]:
    """The mixed prompts that were asked for, then those that copy."""
    copies = read_prompts(args.copies, COPIES) if args.copies else []
    return [*(read_prompts(args.prompts) if args.prompts else []), *copies]


def measure(args: argparse.Namespace, report: Report) -> list[Answer]:
    """Answer every prompt with every choice of sources.

    Each has an engine of its own at each temperature: lookups would find the answers of the one before.
    """
    answers: list[Answer] = []
    for temperature in args.temperatures:
        for choice in choices(args):
            done = _asked(args, choice, temperature)
            answers += done
            found = yield_of(done)
            report.progress(
                f"T {temperature:g}  {label(choice):<32} {found.tokens} tokens in {found.passes} passes, "
                f"{found.pooled:.2f} a pass, {sum(a.seconds for a in done):.0f} s"
            )
    return answers


def _asked(args: argparse.Namespace, choice: str, temperature: float) -> list[Answer]:
    bits = args.draft_bits if "substitute" in choice.split(",") else None
    answers = []
    with opened(args, draft=choice, draft_bits=bits, learn=False) as engine:
        for number, prompt in enumerate(prompts_of(args)):
            tokens = args.copied_tokens if prompt.kind == "copy" else args.tokens
            params = SamplingParams(temperature, seed=args.seed + number, max_tokens=tokens)
            answers.append(replace(ask(engine, prompt, params), draft=label(choice)))
    return answers


def choices(args: argparse.Namespace) -> list[str]:
    """All that is compared: single sources, then mixtures, each as `--draft` takes it."""
    return [*args.alone, *args.mixed]


def summarise(args: argparse.Namespace, answers: Sequence[Answer]) -> dict[str, Any]:
    """Everything the last line says, from the answers alone."""
    runs = [
        _run(choice, temperature, answers) for temperature in args.temperatures for choice in choices(args)
    ]
    for run in runs:
        parts = [
            other["kinds"]
            for other in runs
            if other["temperature"] == run["temperature"]
            and "," not in other["choice"]
            and other["choice"] in run["choice"].split(",")
        ]
        if "," in run["choice"] and parts:
            run["over_best_single"] = {
                kind: ratio(found["pooled"], max(part[kind]["pooled"] for part in parts))
                for kind, found in run["kinds"].items()
            }
    for run in runs:
        run["choice"] = label(run["choice"])
    return {"model": model_name(args.model), "prompts": len({answer.id for answer in answers}), "runs": runs}


def _run(choice: str, temperature: float, answers: Sequence[Answer]) -> dict[str, Any]:
    group = [a for a in answers if (a.draft, a.temperature) == (label(choice), temperature)]
    kinds = list(dict.fromkeys(a.kind for a in group))
    return {
        "choice": choice,
        "temperature": temperature,
        **asdict(yield_of(group)),
        "tokens_per_s": ratio(sum(a.tokens for a in group), sum(a.seconds for a in group)),
        "others": asdict(yield_of(a for a in group if a.kind != "copy")),
        "kinds": {kind: asdict(yield_of(a for a in group if a.kind == kind)) for kind in kinds},
    }


def table(summary: dict[str, Any], temperature: float) -> Table:
    """Rows: sources; below a mixture, its gain over the best of its parts. Columns: kinds of prompts."""
    runs = [run for run in summary["runs"] if run["temperature"] == temperature]
    kinds = list(dict.fromkeys(kind for run in runs for kind in run["kinds"]))
    title = f"tokens per pass, {summary['model']}, T {temperature:g}, budget {summary['budget']}"
    view = grid(title, "sources", *kinds, "all")
    for run in runs:
        cells = [f"{run['kinds'][kind]['pooled']:.2f}" for kind in kinds]
        view.add_row(run["choice"], *cells, f"{run['pooled']:.2f}")
        if "over_best_single" in run:
            gains = [f"×{run['over_best_single'][kind]:.2f}" for kind in kinds]
            view.add_row("  of the best of them", *gains, "", style="dim")
    return view


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "tokens", "budget", "width", "temperatures", "draft_bits", "dtype", "memory", "device", "seed")
    shared(p, prompts=28)
    p.add_argument("--alone", nargs="+", default=["substitute", "suffix", "lookup"], metavar="SOURCE")
    p.add_argument("--mixed", nargs="*", default=["substitute,suffix"], metavar="SOURCE,SOURCE")
    p.add_argument("--copies", type=int, default=8, help="how many prompts that copy (default 8)")
    p.add_argument("--copied-tokens", type=int, default=128, help="of prompts that copy (default 128)")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Answer all prompts with every choice of sources and tell."""
    most = min(args.budget, max(args.tokens, args.copied_tokens))
    report.ceiling(f"{most} tokens a pass: the smaller of the tree's nodes and the answer's tokens")
    answers = measure(args, report)
    settings = report.head(args, "dtype", "tokens", "copied_tokens", "budget", "width", "seed")
    summary = {**settings, **summarise(args, answers)}
    best = max(run["pooled"] for run in summary["runs"])
    report.reached(f"{best:.2f} tokens a pass at best", ratio(best, most))
    for temperature in args.temperatures:
        report.out.print(table(summary, temperature))
    report.note(sources_plot(summary["runs"], report.file(suffix=".svg")))
    report.record(summary, device=args.device, answers=[asdict(answer) for answer in answers])
    return summary


main = Command("sources", "Tokens per pass by source of guesses.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

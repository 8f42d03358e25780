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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.acceptance import Answer, yield_of
from bench.lib.plots import plot_file, sources_plot
from bench.lib.report import (
    PROMPTS,
    Prompt,
    Report,
    command_line,
    environment,
    model_name,
    ratio,
    read_prompts,
    write_result,
)
from offspec.core.errors import OffspecError

NAME = "sources"
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
    import offspec

    with offspec.load(
        args.model,
        draft=choice,
        draft_bits=args.draft_bits if "substitute" in choice.split(",") else None,
        memory=args.memory,
        device=args.device,
        dtype=args.dtype,
        budget=args.budget,
        width=args.width,
        learn=False,
    ) as engine:
        return [
            _answer(engine, args, choice, temperature, number, prompt)
            for number, prompt in enumerate(prompts_of(args))
        ]


def choices(args: argparse.Namespace) -> list[str]:
    """All that is compared: single sources, then mixtures, each as `--draft` takes it."""
    return [*args.alone, *args.mixed]


def _answer(
    engine: Any, args: argparse.Namespace, choice: str, temperature: float, number: int, prompt: Prompt
) -> Answer:
    from offspec.core.config import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        seed=args.seed + number,
        max_tokens=args.copied_tokens if prompt.kind == "copy" else args.tokens,
    )
    result = engine.generate(prompt.prompt, params)
    counts = (result.tokens, result.passes, result.seconds)
    return Answer(
        prompt.id, prompt.kind, "coupled", temperature, *counts, result.finish_reason, label(choice), None
    )


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
    return {
        "bench": NAME,
        "model": model_name(args.model),
        **{
            key: getattr(args, key) for key in ("dtype", "tokens", "copied_tokens", "budget", "width", "seed")
        },
        "prompts": len({answer.id for answer in answers}),
        "runs": runs,
    }


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
    view = Table(title=f"tokens per pass, {summary['model']}, T {temperature:g}, budget {summary['budget']}")
    view.add_column("sources")
    for kind in (*kinds, "all"):
        view.add_column(kind, justify="right")
    for run in runs:
        cells = [f"{run['kinds'][kind]['pooled']:.2f}" for kind in kinds]
        view.add_row(run["choice"], *cells, f"{run['pooled']:.2f}")
        if "over_best_single" in run:
            gains = [f"×{run['over_best_single'][kind]:.2f}" for kind in kinds]
            view.add_row("  of the best of them", *gains, "", style="dim")
    return view


def parser() -> argparse.ArgumentParser:
    """The command line of this bench."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="Tokens per pass by source of guesses."
    )
    p.add_argument("model", nargs="?", default="demo", help="target: folder, hub id, .gguf or demo (default)")
    p.add_argument("--alone", nargs="+", default=["substitute", "suffix", "lookup"], metavar="SOURCE")
    p.add_argument("--mixed", nargs="*", default=["substitute,suffix"], metavar="SOURCE,SOURCE")
    p.add_argument("--prompts", type=int, default=28, help="how many prompts, mixed by kind (default 28)")
    p.add_argument("--copies", type=int, default=8, help="how many prompts that copy (default 8)")
    p.add_argument("--tokens", type=int, default=64, help="most new tokens an answer (default 64)")
    p.add_argument("--copied-tokens", type=int, default=128, help="of prompts that copy (default 128)")
    p.add_argument("--budget", type=int, default=256, help="nodes of a tree (default 256)")
    p.add_argument("--width", type=int, default=32, help="nodes a draft step expands (default 32)")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--draft-bits", type=int, choices=(2, 3, 4), help="of a substitute")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--memory", help="memory budget, like 1.5GB (default: what is free)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--seed", type=int, default=1, help="seed of the first prompt; the others count on")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    most = min(args.budget, max(args.tokens, args.copied_tokens))
    try:
        report.ceiling(f"{most} tokens a pass: the smaller of the tree's nodes and the answer's tokens")
        answers = measure(args, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    summary = summarise(args, answers)
    best = max(run["pooled"] for run in summary["runs"])
    report.reached(f"{best:.2f} tokens a pass at best", ratio(best, most))
    for temperature in args.temperatures:
        report.out.print(table(summary, temperature))
    record = {
        **summary,
        "command": command_line(f"bench.{NAME}", words),
        "environment": environment(args.device),
        "answers": [asdict(answer) for answer in answers],
    }
    report.note(sources_plot(summary["runs"], plot_file(NAME, args.json)))
    write_result(NAME, record, args.json)
    report.last_line(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tokens per pass against bytes: the target's own weights at 4, 3 and 2 bits as its draft.

    python -m bench.substitute [MODEL] [--bits 4 3 2] [--prompts N] [--temperatures 0 1.0]

The target drafting for itself in 16 bits is the ceiling, and is run first. Budget and width of the trees are
the same for all. Bytes are those of the draft's layers, rounded as they are packed; with the memory there is
here they may be kept as values, which makes the same guesses.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench import acceptance
from bench.lib.command import MODEL, Command, shared
from bench.lib.plots import substitute_plot
from bench.lib.report import Prompt, Report, model_name, ratio, read_prompts
from offspec.core.config import format_bytes

UNROUNDED = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One width at one temperature: `pooled` = all tokens / all passes, `mean` = over prompts.

    of_ceiling: pooled over that of the target itself in 16 bits.
    """

    bits: int
    temperature: float
    draft: str
    bytes: int
    tokens: int
    passes: int
    pooled: float
    mean: float
    of_ceiling: float


def layer_bytes(model: str, dtype: str) -> dict[int, int]:
    """Bytes of all layers of a model, by the bits that they are rounded to."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel
    from offspec.model.quantize.resident_layers import rounded_bytes

    checkpoint = open_checkpoint(model)
    loaded = LoadedModel(checkpoint.folder, checkpoint.tensors, getattr(torch, dtype), torch.device("cpu"))
    try:
        layers = loaded.skeleton.layers
        values = sum(weight.nbytes for weight in layers.parameters())
        rounded = {bits: sum(rounded_bytes(layer, bits) for layer in layers) for bits in (2, 3, 4)}
        return rounded | {UNROUNDED: values}
    finally:
        loaded.close()


def answers_at(
    args: argparse.Namespace, bits: int, prompts: list[Prompt], report: Report
) -> list[acceptance.Answer]:
    """Every prompt at every temperature, drafted for by the target itself in so many bits."""
    draft = (
        {"draft": args.model, "draft_bits": None}
        if bits == UNROUNDED
        else {"draft": "substitute", "draft_bits": bits}
    )
    return acceptance.measure(argparse.Namespace(**{**vars(args), **draft}), prompts, report)


def rows_of(
    answers: dict[int, list[acceptance.Answer]], sizes: dict[int, int], temperatures: list[float]
) -> list[Row]:
    """Widest first, temperature by temperature; `answers` has those of 16 bits."""
    rows = list[Row]()
    for temperature in temperatures:
        found = {
            bits: acceptance.yield_of(answer for answer in group if answer.temperature == temperature)
            for bits, group in answers.items()
        }
        for bits in sorted(found, reverse=True):
            one = found[bits]
            rows.append(
                Row(
                    bits,
                    temperature,
                    answers[bits][0].draft,
                    sizes[bits],
                    *(one.tokens, one.passes, one.pooled, one.mean),
                    ratio(one.pooled, found[UNROUNDED].pooled),
                )
            )
    return rows


def table(rows: list[Row]) -> Table:
    """A line for each width and temperature."""
    view = Table("draft", "bytes of layers", "T", "tokens a pass", "mean over prompts", "of the ceiling")
    for row in rows:
        figures = (f"{row.pooled:.2f}", f"{row.mean:.2f}", f"{row.of_ceiling:.2f}")
        view.add_row(f"{row.bits} bits", format_bytes(row.bytes), f"{row.temperature:g}", *figures)
    return view


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "prompts", "tokens", "budget", "width", "temperatures", "dtype", "memory", "device", "seed")
    p.add_argument("--bits", type=int, nargs="+", choices=(4, 3, 2), default=[4, 3, 2])
    # What the answers of bench.acceptance may vary besides.
    p.set_defaults(verify=["coupled"], greedy_each=False, ignore_eos=False, check=False)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Answer all prompts at every width and tell."""
    prompts, sizes = read_prompts(args.prompts), layer_bytes(args.model, args.dtype)
    answers = {UNROUNDED: answers_at(args, UNROUNDED, prompts, report)}
    for row in rows_of(answers, sizes, args.temperatures):
        report.ceiling(
            f"{row.pooled:.2f} tokens a pass at T {row.temperature:g}: the target drafts for itself in "
            f"16 bits, {format_bytes(row.bytes)}"
        )
    answers |= {bits: answers_at(args, bits, prompts, report) for bits in args.bits}
    rows = rows_of(answers, sizes, args.temperatures)
    for row in rows:
        if row.bits != UNROUNDED:
            what = f"{row.bits} bits, T {row.temperature:g}: {row.pooled:.2f} tokens a pass"
            report.reached(what, row.of_ceiling)
    report.out.print(table(rows))
    summary: dict[str, Any] = {
        **report.head(args, "dtype", "tokens", "budget", "width", "seed"),
        "model": model_name(args.model),
        "prompts": len(prompts),
        "rows": [asdict(row) for row in rows],
    }
    given = {str(bits): [asdict(answer) for answer in group] for bits, group in answers.items()}
    report.record(summary, device=args.device, answers=given)
    report.note(substitute_plot(summary["rows"], summary["model"], report.file(suffix=".svg")))
    return summary


main = Command("substitute", "Tokens per pass of substitutes, by their bits.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

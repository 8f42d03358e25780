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
from pathlib import Path
from typing import Any

from rich.table import Table

from bench import acceptance
from bench.lib.plots import plot_file, substitute_plot
from bench.lib.report import (
    Prompt,
    Report,
    command_line,
    environment,
    model_name,
    ratio,
    read_prompts,
    write_result,
)
from offspec.core.config import format_bytes
from offspec.core.errors import OffspecError

NAME = "substitute"
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


def parser() -> argparse.ArgumentParser:
    """The command line of this bench."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="Tokens per pass of substitutes, by their bits."
    )
    p.add_argument("model", nargs="?", default="demo", help="target: folder, hub id, .gguf or demo (default)")
    p.add_argument("--bits", type=int, nargs="+", choices=(4, 3, 2), default=[4, 3, 2])
    p.add_argument("--prompts", type=int, help="how many prompts, mixed by kind (default: all)")
    p.add_argument("--tokens", type=int, default=64, help="most new tokens an answer (default 64)")
    p.add_argument("--budget", type=int, default=256, help="nodes of a tree (default 256)")
    p.add_argument("--width", type=int, default=32, help="nodes a draft step expands (default 32)")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--memory", help="memory budget, like 1.5GB (default: what is free)")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--seed", type=int, default=1, help="seed of the first prompt; the others count on")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    # What the answers of bench.acceptance may vary besides.
    p.set_defaults(verify=["coupled"], greedy_each=False, ignore_eos=False, check=False)
    return p


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    try:
        prompts, sizes = read_prompts(args.prompts), layer_bytes(args.model, args.dtype)
        answers = {UNROUNDED: answers_at(args, UNROUNDED, prompts, report)}
        for row in rows_of(answers, sizes, args.temperatures):
            report.ceiling(
                f"{row.pooled:.2f} tokens a pass at T {row.temperature:g}: the target drafts for itself in "
                f"16 bits, {format_bytes(row.bytes)}"
            )
        answers |= {bits: answers_at(args, bits, prompts, report) for bits in args.bits}
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    rows = rows_of(answers, sizes, args.temperatures)
    for row in rows:
        if row.bits != UNROUNDED:
            what = f"{row.bits} bits, T {row.temperature:g}: {row.pooled:.2f} tokens a pass"
            report.reached(what, row.of_ceiling)
    report.out.print(table(rows))
    summary: dict[str, Any] = {
        "bench": NAME,
        "model": model_name(args.model),
        **{key: getattr(args, key) for key in ("dtype", "tokens", "budget", "width", "seed")},
        "prompts": len(prompts),
        "rows": [asdict(row) for row in rows],
    }
    record = {
        **summary,
        "command": command_line(f"bench.{NAME}", words),
        "environment": environment(args.device),
        "answers": {str(bits): [asdict(answer) for answer in group] for bits, group in answers.items()},
    }
    write_result(NAME, record, args.json)
    report.note(substitute_plot(summary["rows"], summary["model"], plot_file(NAME, args.json)))
    report.last_line(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`offspec distill`: train a draft head on text that the target generates."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offspec.checkpoint.open import check_model
from offspec.core.config import Dtype
from offspec.core.errors import RequestError
from offspec.distill.config import DistillConfig, TimeLimit
from offspec.distill.prompts import read_prompts
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.distill.distill_head import DistillResult

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}

EPILOG = """[bold]Examples[/]

Medusa heads for the demo model, in about 15 minutes on a small machine:

  offspec distill demo --kind medusa --out ./demo-medusa

  offspec generate demo "Why is the sky blue?" --draft ./demo-medusa

An MLPSpeculator for a streamed model, from 2 million of its own tokens; after Ctrl-C the same command
resumes and loses at most one batch:

  offspec distill ./Qwen3-8B --kind mlp --tokens 2M --memory 4GB --out ./Qwen3-8B-mlp
"""


@opt.takes_options
def distill(
    model: str,
    kind: Literal["medusa", "mlp", "eagle3"],
    out: Path,
    depth: int = 4,
    tokens: str = "200k",
    prompts: Path | None = None,
    length: int = 160,
    epochs: int = 10,
    minutes: float | None = None,
    memory: int | None = None,
    device: str = "auto",
    dtype: Dtype = "bfloat16",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Train a draft head for a model on text that the model generates.

    The head is saved in its published format for [bold]--draft[/], and is
    measured on text held out from training.

    Head:
        kind: Kind of head: `medusa` (one block per token ahead, quick to train), `mlp` (MLPSpeculator), or
            `eagle3` (autoregressive layer; higher acceptance rate, slower to train).
        out (DIR): Folder to write, with config.json and weights in the published format.
        depth (N): Number of consecutive tokens that the head predicts; for eagle3, the depth it is trained
            for.

    Text and training:
        tokens (N): Tokens of training text that the target generates, such as 200k or 2M. They are kept for
            other heads.
        prompts (FILE): Prompts, one per line, or a .jsonl file of objects with `prompt`. Default: about 1,000
            prompts included in offspec.
        length (TOKENS): Maximum number of tokens per answer.
        epochs (N): Maximum number of epochs.
        minutes (M): Time limit of the whole run in minutes; `--tokens` and `--epochs` become upper limits.
            Default: no limit for the text, 8 minutes for training.

    Output:
        as_json: Print one JSON object about the head instead of its folder.
        quiet: Suppress progress and notices on stderr.
    """
    limit = TimeLimit(minutes)  # started before the imports below, which also take time
    count = parse_count(tokens)
    wanted = DistillConfig(
        model, kind, out, count, length=length, epochs=epochs, minutes=minutes, depth=depth
    )
    check_model(model)
    if prompts is not None:
        read_prompts(prompts)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.distill.distill_head import (
            distill_head,
        )  # imports torch: after every check of the options

        made = distill_head(
            wanted,
            prompts=prompts,
            memory=memory,
            device=device,
            dtype=dtype,
            notify=renderer.show,
            limit=limit,
        )
        for line in _summary(made):
            renderer.note(line)
    StdoutWriter().write((json.dumps(_to_json(made)) if as_json else str(made.folder)) + "\n")


def parse_count(text: str) -> int:
    """Parse a number of tokens such as `200k`, `2M` or plain digits. Raises RequestError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)\s*", text, re.IGNORECASE)
    if not match:
        raise RequestError(f"{text!r} is not a number of tokens; write it like 200k or 2M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _summary(made: "DistillResult") -> list[str]:
    shares = [
        f"{100 * first:.0f} % (top 5: {100 * fifth:.0f} %)"
        for first, fifth in zip(made.measured.first, made.measured.fifth, strict=True)
    ]
    return [
        f"{made.kind}: {format_bytes(made.nbytes)} of weights, {made.tokens} tokens of text, "
        f"{made.trained.epochs:.1f} epochs, in {format_seconds(made.seconds)}",
        f"top-1 accuracy by depth on {made.measured.rows} held-out tokens: {', '.join(shares)}",
        f"expected with trees of {made.measured.nodes} nodes: {made.measured.expected:.2f} tokens per pass",
    ]


def _to_json(made: "DistillResult") -> dict[str, Any]:
    return {
        "folder": str(made.folder),
        "kind": made.kind,
        "bytes": made.nbytes,
        "tokens": made.tokens,
        "epochs": round(made.trained.epochs, 3),
        "steps": made.trained.steps,
        "training_seconds": made.trained.seconds,
        "seconds": made.seconds,
        "held_out_tokens": made.measured.rows,
        "first_guess": made.measured.first,
        "first_five_guesses": made.measured.fifth,
        "tokens_per_pass": made.measured.expected,
        "nodes": made.measured.nodes,
    }

"""`offspec distill`: a head for a target, trained on the target's own text."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offspec.checkpoint.open import check_model
from offspec.core.config import Dtype
from offspec.core.errors import RequestError
from offspec.distill.config import TimeLimit, Wanted
from offspec.distill.questions import read_questions
from offspec.ui.cli import options as opt
from offspec.ui.cli.output import Output
from offspec.ui.cli.render import Renderer
from offspec_planners.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from offspec.distill.make import Distilled

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}

EPILOG = """[bold]Examples[/]

Medusa heads for the demo model, in about a quarter of an hour on a small machine:

  offspec distill demo --kind medusa --out ./demo-medusa

  offspec generate demo "Why is the sky blue?" --draft ./demo-medusa

An MLPSpeculator for a model that streams, from two million of its own tokens; after Ctrl-C the same command
resumes, and one batch at most is lost:

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
    """Train a draft head for a model, on text that the model generates.

    The head is written in the published format, and [bold]--draft[/] takes
    its folder. It is measured on text held out from training.

    Head:
        kind: `medusa`: one block for each token ahead, small and quick to train. `mlp`: an MLPSpeculator,
            which reads the tokens of a branch. `eagle3`: an autoregressive layer of any depth; accepted more
            often, and slower to train.
        out (DIR): The folder to make, with config.json and weights in the published format.
        depth (N): Tokens that the head predicts in a row; for eagle3, the depth it is trained for.

    Text and training:
        tokens (N): Tokens of training text that the target generates, such as 200k or 2M. They are kept for
            other heads.
        prompts (FILE): Prompts, one a line, or with .jsonl a `prompt` in each object. Without it: about a
            thousand that come with offspec.
        length (TOKENS): Most tokens of one answer.
        epochs (N): Most epochs over the text.
        minutes (M): Longest time of the whole run in minutes: opening the model, generating text, training
            and measuring. What there is no time for is left out; `--tokens` and `--epochs` are then upper
            limits. Without it: as long as the text takes, and 8 minutes of training.

    Output:
        as_json: Print one JSON object about the head instead of its folder.
        quiet: No progress or notices on stderr.
    """
    limit = TimeLimit(minutes)  # what is imported below takes time, too
    count = parse_count(tokens)
    wanted = Wanted(model, kind, out, count, length=length, epochs=epochs, minutes=minutes, depth=depth)
    check_model(model)
    if prompts is not None:
        read_questions(prompts)
    with Renderer(as_json=as_json, quiet=quiet) as renderer:
        from offspec.distill.make import distill_head  # imports torch: after every check of the options

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
    Output().write((json.dumps(_described(made)) if as_json else str(made.folder)) + "\n")


def parse_count(text: str) -> int:
    """A number of tokens from `200k`, `2M` or plain digits. Raises RequestError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?)\s*", text, re.IGNORECASE)
    if not match:
        raise RequestError(f"cannot read {text!r} as a number of tokens; write it like 200k or 2M")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _summary(made: "Distilled") -> list[str]:
    shares = [
        f"{100 * first:.0f} % ({100 * fifth:.0f} % in five)"
        for first, fifth in zip(made.measured.first, made.measured.fifth, strict=True)
    ]
    return [
        f"{made.kind}: {format_bytes(made.nbytes)} of weights, {made.tokens} tokens of text, "
        f"{made.trained.epochs:.1f} epochs, in {format_seconds(made.seconds)}",
        f"on {made.measured.rows} held-out tokens its first choice is right, by depth: {', '.join(shares)}",
        f"with trees of {made.measured.nodes} nodes that is {made.measured.expected:.2f} tokens per pass",
    ]


def _described(made: "Distilled") -> dict[str, Any]:
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

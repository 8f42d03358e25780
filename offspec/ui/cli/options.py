"""The options that commands share, as annotated types: name, help and the panel each is shown in."""

import re
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer

from offspec.core.config import DraftBits as Bits
from offspec.core.config import PackFormat, Tree, Verify
from offspec.core.errors import RequestError

MODEL_PANEL = "Model and machine"
DRAFT_PANEL = "Speculation: how fast"
SAMPLING_PANEL = "Sampling: which words"
OUTPUT_PANEL = "Prompt and output"


def _device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise typer.BadParameter(f"{value!r} is neither cpu nor cuda (cuda:1 for the second GPU)")
    return value


def checked_bits(bits: int | None) -> Bits | None:
    """The bits of a draft's weights, if they were given. Raises RequestError."""
    if bits not in (None, *get_args(Bits)):
        raise RequestError(f"--draft-bits must be 2, 3, 4 or 16, not {bits}")
    return cast(Bits | None, bits)


def _number_or_auto(value: str) -> str:
    if value != "auto" and not re.fullmatch(r"\d+", value):
        raise typer.BadParameter(f"{value!r} is neither a number of nodes nor auto")
    return value


def number_or_auto(value: str) -> int | None:
    """What a checked `--budget` or `--width` means: None where a plan is to choose."""
    return None if value == "auto" else int(value)


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The target: a hub id, a local folder, a [bold].gguf[/] file, or [bold]demo[/], the small "
        "model that [bold]make env[/] installs.",
        show_default=False,
    ),
]
Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="What to say to it. Left out, or [bold]-[/], it is read from standard input; the newline "
        "at its end is dropped.",
        show_default=False,
    ),
]

Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most RAM the whole process may use, such as 1.5GB or 800MiB. What does not fit streams "
        "from disk in every pass. Without it: what the machine has free.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Vram = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="The most memory of the GPU that may be used. What does not fit there comes from RAM, and what "
        "does not fit in RAM from disk. Without it: most of what the GPU has free.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Device = Annotated[
    str,
    typer.Option(metavar="cpu|cuda", callback=_device, help="Where to compute.", rich_help_panel=MODEL_PANEL),
]
DeviceOrDefault = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="cpu|cuda",
        callback=lambda value: value if value is None else _device(value),
        help="Where to compute. Without it: the CPU, or with [bold]--hardware[/] what that machine computes "
        "with.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Dtype = Annotated[
    Literal["bfloat16", "float32"],
    typer.Option(
        help="Number format of weights and arithmetic. float32 doubles the bytes and removes near-ties.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Room for this many tokens of prompt and answer. Without it: as much as fits, within reason.",
        rich_help_panel=MODEL_PANEL,
    ),
]
Quantize = Annotated[
    PackFormat | None,
    typer.Option(
        help="Round the target to fewer bits, and run that: fewer bytes to stream, somewhat other answers. "
        "Done once, as [bold]offspec pack[/] does it, and kept in the cache.",
        rich_help_panel=MODEL_PANEL,
    ),
]

Draft = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH[,...]|auto|none",
        help="Who guesses ahead, one source or several with commas between: a small model or a trained head "
        "(folder, file or hub id); [bold]substitute[/], a copy of the target in 4 bits or fewer; "
        "[bold]suffix[/] or [bold]lookup[/], which copy from the text; [bold]early-exit[/] or [bold]mtp[/], "
        "layers of the target itself. [bold]auto[/] takes the best there is; [bold]none[/] goes without.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
DraftBits = Annotated[
    int | None,
    typer.Option(
        metavar="2|3|4|16",
        help="Bits of the draft's weights: fewer take less memory and guess worse. Without it a named draft "
        "stays as it is, and a substitute has 4, 3 or 2, the most that fit.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
Corpus = Annotated[
    list[Path] | None,
    typer.Option(
        "--draft-corpus",
        metavar="FILE|FOLDER",
        exists=True,
        help="Text that [bold]suffix[/] may copy from as well: files, saved conversations, or folders of "
        "them. May be given several times.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
Budget = Annotated[
    str,
    typer.Option(
        metavar="NODES|auto",
        callback=_number_or_auto,
        help="The most guesses checked in one pass. More cost compute, and pay while the disk is the "
        "slower part; [bold]auto[/] takes what a plan found fastest, which is made on first use.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
Width = Annotated[
    str,
    typer.Option(
        metavar="NODES|auto",
        callback=_number_or_auto,
        help="Guesses that one draft step continues at once; [bold]auto[/] takes what the plan found.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
TreeKind = Annotated[
    Tree,
    typer.Option(
        "--tree",
        help="[bold]dynamic[/] grows every tree along its likeliest paths; [bold]sequoia[/] fills one shape "
        "that was optimised for what this draft was seen to guess.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
PlanFile = Annotated[
    Path | None,
    typer.Option(
        "--plan",
        metavar="FILE",
        help="Follow a plan that [bold]offspec plan --save[/] wrote, with whatever you changed in it.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
VerifyRule = Annotated[
    Verify,
    typer.Option(
        help="What the draft knows. [bold]coupled[/]: the dice that the target will throw, so that its "
        "guesses hold at any temperature. [bold]plain[/]: only the odds, as in SpecExec; to compare. "
        "[bold]sequoia[/]: it draws guesses of its own, for [bold]--tree sequoia[/]; what is sampled is as "
        "likely, but depends on the draft.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
NoSpeculation = Annotated[
    bool,
    typer.Option(
        "--no-speculation",
        metavar="",
        help="Decode one token a pass, as if there were no draft.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
Check = Annotated[
    bool,
    typer.Option(
        "--check",
        metavar="",
        help="Decode a second time without speculation and report where, if anywhere, the tokens differ "
        "and how near the tie was. Takes as long as that takes.",
        rich_help_panel=DRAFT_PANEL,
    ),
]

Temperature = Annotated[
    float,
    typer.Option(
        metavar="T", help="0 takes the likeliest token; higher is freer.", rich_help_panel=SAMPLING_PANEL
    ),
]
TopP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Sample from the likeliest tokens that hold this share of the probability.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
TopK = Annotated[
    int,
    typer.Option(
        metavar="K", help="Sample from the K likeliest tokens; 0 is off.", rich_help_panel=SAMPLING_PANEL
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        metavar="P",
        help="Drop tokens less likely than this share of the likeliest one's probability.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Above 1, tokens of the prompt or the answer come back less.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
PresencePenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Taken off the logit of every token that is in the answer.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        metavar="X",
        help="Taken off once for each time the token is in the answer.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The same seed gives the same answer. Without it a fresh one is drawn, and reported.",
        rich_help_panel=SAMPLING_PANEL,
    ),
]

System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT", help="A system message to go before the prompt.", rich_help_panel=OUTPUT_PANEL
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        metavar="",
        help="Go on with the latest conversation held with this model.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
SessionName = Annotated[
    str | None,
    typer.Option(
        "--session",
        metavar="NAME",
        help="Go on with this conversation: its name, the beginning of its id, or its file.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        metavar="",
        help="A line mode: questions from standard input, answers on standard output. Taken by itself "
        "where one of the two is a pipe or a file.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        metavar="",
        help="Continue the prompt as it is, without the model's chat template.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
MaxTokens = Annotated[
    int, typer.Option(metavar="N", help="Stop after this many tokens.", rich_help_panel=OUTPUT_PANEL)
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="Stop before this text. May be given several times.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        metavar="",
        help="Go on past the model's own end of answer.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        metavar="",
        help="Print one JSON object with the text, the token ids and the statistics instead of the text.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        metavar="",
        help="No progress, notices or statistics on stderr.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Write a timeline of reads, copies, layers and draft steps. Open it at "
        "https://ui.perfetto.dev to see what waits for what; a name that ends in .gz packs it.",
        rich_help_panel=OUTPUT_PANEL,
    ),
]

"""The options that commands share: name, help and the panel each is shown in, and what they come to."""

import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from functools import partial, wraps
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

from offspec.core.config import (
    DraftBits,
    EngineConfig,
    Experts,
    KVCache,
    PackFormat,
    SamplingParams,
    Tree,
    Verify,
    parse_bytes,
)
from offspec.core.errors import RequestError
from offspec.core.sampling_defaults import FROM_MODEL, SamplingOverrides
from offspec.ui.cli import completion

# Options by their panel of the help. A flag has metavar="", or the help would show a type for it.
model_option = partial(typer.Option, rich_help_panel="Model and machine")
draft_option = partial(typer.Option, rich_help_panel="Speculation: how fast")
sampling_option = partial(typer.Option, rich_help_panel="Sampling: which words")
rule_option = partial(typer.Option, rich_help_panel="Rules: what may come and what may not")
output_option = partial(typer.Option, rich_help_panel="Prompt and output")
OPEN_SCHEMAS = (
    "Allow objects of a JSON schema properties that it does not name, as JSON Schema does. By default "
    "they are closed unless the schema says otherwise, since small models add one after the other."
)


def _size_or_none(value: str) -> int:
    """A number of bytes, which may be none at all."""
    return parse_bytes(value, least=0)


def checked_device(value: str) -> str:
    """One device, or several GPUs. Raises typer.BadParameter."""
    if not re.fullmatch(r"auto|cpu|all|cuda(:\d+)?(,cuda:\d+)*", value):
        raise typer.BadParameter(
            f"{value!r} is not auto, cpu or cuda (cuda:1: the second GPU; cuda:0,cuda:1: two; all: every GPU)"
        )
    return value


def _bits(bits: int | None) -> int | None:
    if bits not in (None, *get_args(DraftBits)):
        raise RequestError(f"--draft-bits must be 2, 3, 4 or 16, not {bits}")
    return bits


def _number_or_auto(value: str, of: str = "nodes") -> int | None:
    """A number, or None where a plan is to choose."""
    if value != "auto" and not re.fullmatch(r"\d+", value):
        raise typer.BadParameter(f"{value!r} is neither a number of {of} nor auto")
    return None if value == "auto" else int(value)


def _sequences_or_auto(value: str) -> int | None:
    return _number_or_auto(value, "sequences")


def _layers_or_auto(value: str) -> int | None:
    return _number_or_auto(value, "layers")


def _token_ids(value: str) -> tuple[int, ...]:
    """Token ids from "1,2,30"."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise typer.BadParameter(f"{value!r} is no list of token ids; write them like 13,198")
    return tuple(map(int, value.split(",")))


def _biases(value: str) -> tuple[tuple[int, float], ...]:
    """Token ids and what is added to their logits, from "13=-2.5,198=1"."""
    try:
        pairs = [pair.split("=") for pair in value.split(",")]
        return tuple((int(token), float(bias)) for token, bias in pairs)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is no list of biases; write them like 13=-2.5,198=1") from None


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="The target: a hub id, with [bold]:Q4_K_M[/] for one of its GGUF files, a local folder, a "
        "[bold].gguf[/] file, [bold]demo[/], the small model that [bold]make env[/] installs, or "
        "[bold]demo-wide[/], that one made 16 times as large. "
        "[bold]offspec config set model[/] makes one the default.",
        show_default=False,
        autocompletion=completion.models,
    ),
]
Memory = Annotated[
    int | None,
    model_option(
        parser=parse_bytes,
        metavar="SIZE",
        help="Memory limit of the whole process, such as 1.5GB or 800MiB. What does not fit streams from "
        "disk in every pass. Without it: what the machine has free.",
    ),
]
Device = Annotated[
    str,
    model_option(
        metavar="auto|cpu|cuda|all",
        callback=checked_device,
        help="Where to compute. [bold]auto[/] takes a GPU that is usable, else the CPU, and says which and "
        "why. [bold]cuda:0,cuda:1[/] divides the layers among two GPUs, [bold]all[/] among all there are; "
        "drafts run on the first.",
    ),
]
Dtype = Annotated[
    Literal["bfloat16", "float32"],
    model_option(help="Number format of weights and arithmetic. float32 doubles the bytes and rounds less."),
]
Quiet = Annotated[
    bool,
    output_option("--quiet", "-q", metavar="", help="No progress, notices or statistics on stderr."),
]
System = Annotated[
    str | None,
    output_option(metavar="TEXT", help="A system message before the prompt."),
]
MaxTokens = Annotated[int, output_option(metavar="N", help="Stop after this many tokens.")]

Stop = Annotated[
    list[str] | None,
    output_option(metavar="TEXT", help="Stop before this text. May be given several times."),
]


@dataclass(frozen=True)
class EngineOptions:
    """What a plan is made for: a model, the machine it runs on, and its draft."""

    model: Model
    memory: Memory = None
    vram: Annotated[
        int | None,
        model_option(
            parser=parse_bytes,
            metavar="SIZE",
            help="The most memory of the GPU, or of each, that may be used. What does not fit there comes "
            "from RAM, and what does not fit in RAM from disk. Without it: most of what the GPU has free.",
        ),
    ] = None
    device: Device = "auto"
    cpu_layers: Annotated[
        Any,
        model_option(
            "--cpu-layers",
            metavar="LAYERS|auto",
            parser=_layers_or_auto,
            help="Layers that stay in RAM and are computed by the CPU instead of being copied to the GPU: "
            "faster with small trees, as [bold]offspec plan[/] shows, slower with long prompts. A CPU rounds "
            "in another way, so in bfloat16 or with [bold]--kv-cache int8[/] answers depend on this number, "
            "and [bold]auto[/] takes none; in float32 it takes as many as are fastest.",
        ),
    ] = "auto"
    experts: Annotated[
        Experts,
        model_option(
            "--experts",
            help="What computes the experts of a mixture beside a GPU. [bold]gpu[/]: itself; those that it "
            "has no room for are copied to it when a router chooses them. [bold]cpu[/]: the CPU, all of them "
            "from RAM, and only rows cross to the GPU and back: faster with small trees where the GPU has "
            "room for few, slower with long prompts. A CPU rounds in another way, so in bfloat16 or with "
            "[bold]--kv-cache int8[/] answers depend on it, and [bold]auto[/] takes the GPU; in float32 it "
            "takes what a plan says is faster.",
        ),
    ] = "auto"
    dtype: Dtype = "bfloat16"
    context: Annotated[
        int | None,
        model_option(
            metavar="TOKENS",
            help="Room for this many tokens of prompt and answer. Without it: as much as fits, within "
            "reason.",
        ),
    ] = None
    kv_cache: Annotated[
        KVCache,
        model_option(
            "--kv-cache",
            help="How the target keeps the keys and values of its context: in the numbers of the "
            "[bold]model[/], or in [bold]int8[/], about half the memory and slightly different answers.",
        ),
    ] = "model"
    quantize: Annotated[
        PackFormat | None,
        model_option(
            help="Round the target to fewer bits and run that: fewer bytes to stream, slightly different "
            "answers. Done once, as by [bold]offspec pack[/], and kept in the cache."
        ),
    ] = None
    draft: Annotated[
        str,
        draft_option(
            metavar="NAME|PATH[,...]|auto|none",
            autocompletion=completion.drafts,
            help="Draft sources, one or several with commas between: a small model or a trained "
            "head (folder, file or hub id); [bold]substitute[/], a copy of the target in 4 bits or fewer; "
            "[bold]suffix[/] or [bold]lookup[/], which copy from the text; [bold]early-exit[/] or "
            "[bold]mtp[/], layers of the target itself. [bold]auto[/] selects the best available; "
            "[bold]none[/] turns speculation off.",
        ),
    ] = "auto"
    draft_bits: Annotated[
        int | None,
        draft_option(
            callback=_bits,
            metavar="2|3|4|16",
            help="Bits of the draft's weights: fewer take less memory and predict worse. Without it a named "
            "draft keeps its own precision, and a substitute has 4, 3 or 2, the most that fit.",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        sampling_option(
            metavar="T",
            show_default="0",
            help="0 takes the likeliest token; higher values sample more freely.",
        ),
    ] = None


@dataclass(frozen=True)
class RequestOptions(EngineOptions):
    """What asking a model takes beside it: how trees are grown, and how tokens are chosen."""

    cache_size: Annotated[
        int | None,
        model_option(
            "--cache-size",
            parser=_size_or_none,
            metavar="SIZE",
            help="Disk space in the cache for conversations: their keys and values are written there when "
            "another takes their place and when the program ends, and read where that is quicker than to "
            "compute the prompt again. Other users cannot read them. 0 keeps none, as is usual; "
            "[bold]offspec serve[/] keeps 4 GB unless it is told otherwise.",
        ),
    ] = None
    corpus: Annotated[
        list[Path] | None,
        draft_option(
            "--draft-corpus",
            metavar="FILE|FOLDER",
            exists=True,
            help="Text that [bold]suffix[/] may copy from as well: files, saved conversations, or folders of "
            "them. May be given several times.",
        ),
    ] = None
    budget: Annotated[
        Any,
        draft_option(
            metavar="NODES|auto",
            parser=_number_or_auto,
            help="The most tree nodes verified in one pass. More nodes cost compute, and pay off while the "
            "disk is the slower part; [bold]auto[/] takes the fastest by a plan, which is made on first use.",
        ),
    ] = "auto"
    width: Annotated[
        Any,
        draft_option(
            metavar="NODES|auto",
            parser=_number_or_auto,
            help="Tree nodes that one draft step expands; [bold]auto[/] takes the fastest by the plan. With "
            "a number here and for [bold]--budget[/] nothing is planned: trees are as large as that, but for "
            "times when passes without any are seen to be faster.",
        ),
    ] = "auto"
    tree: Annotated[
        Tree,
        draft_option(
            "--tree",
            help="[bold]dynamic[/] grows every tree along its likeliest paths; [bold]sequoia[/] uses one "
            "shape, optimised for the measured acceptance of this draft.",
        ),
    ] = "dynamic"
    plan: Annotated[
        Path | None,
        draft_option(
            "--plan",
            metavar="FILE",
            help="Follow a plan that [bold]offspec plan --save[/] wrote, with your changes in it.",
        ),
    ] = None
    verify: Annotated[
        Verify,
        draft_option(
            help="Verification rule. [bold]coupled[/]: draft and target share the sampling noise, so that "
            "drafts are accepted at any temperature. [bold]plain[/]: the draft ranks by probability alone, "
            "as in SpecExec; for comparison. [bold]sequoia[/]: the draft samples tokens of its own, for "
            "[bold]--tree sequoia[/]; the distribution is the target's, but the tokens depend on the draft."
        ),
    ] = "coupled"
    top_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            show_default="1",
            help="Sample from the likeliest tokens that together have this probability.",
        ),
    ] = None
    top_k: Annotated[
        int | None,
        sampling_option(metavar="K", show_default="0", help="Sample from the K likeliest tokens; 0 is off."),
    ] = None
    min_p: Annotated[
        float | None,
        sampling_option(
            metavar="P",
            show_default="0",
            help="Exclude tokens less likely than this share of the likeliest one's probability.",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        sampling_option(
            metavar="X",
            show_default="1",
            help="Values above 1 make tokens of the prompt and the answer less likely to repeat.",
        ),
    ] = None
    presence_penalty: Annotated[
        float,
        sampling_option(metavar="X", help="Subtracted from the logit of every token that is in the answer."),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        sampling_option(metavar="X", help="Subtracted once for each time the token is in the answer."),
    ] = 0.0
    seed: Annotated[
        int | None,
        sampling_option(
            metavar="N",
            help="The same seed gives the same answer. Without it a random one is chosen and reported.",
        ),
    ] = None


@dataclass(frozen=True)
class SampledOptions(RequestOptions):
    """Options of commands for which sampling options that are not given have the model's defaults."""

    greedy: Annotated[
        bool,
        sampling_option(
            "--greedy",
            metavar="",
            help="Temperature 0, and no sampling defaults of the model. Without it, sampling options that "
            "you omit have the values of the model's [bold]generation_config.json[/], or of "
            "[bold]general.sampling[/] in a GGUF file.",
        ),
    ] = False

    def __post_init__(self) -> None:
        if self.greedy and self.temperature:
            raise RequestError("--greedy is temperature 0: leave out --greedy or --temperature")
        if self.greedy:
            object.__setattr__(self, "temperature", 0.0)


@dataclass(frozen=True)
class SharedOptions(SampledOptions):
    """Where several requests are answered side by side."""

    sequences: Annotated[
        Any,
        model_option(
            "--sequences",
            metavar="N|auto",
            parser=_sequences_or_auto,
            help="Requests that are answered side by side: they share the trips of the weights, and each "
            "takes memory for a context of its own. [bold]auto[/] takes up to 8, as many as cost hardly a "
            "layer its place in memory.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class RuledOptions(SampledOptions):
    """The same with rules for single tokens and their order."""

    bad_words: Annotated[
        list[str] | None,
        rule_option(
            metavar="TEXT",
            help="Never say this, at the start of a word or within it. May be given several times.",
        ),
    ] = None
    no_repeat_ngram_size: Annotated[
        int,
        rule_option(
            metavar="N",
            help="Never say the same N tokens in a row twice, those of the prompt included; 0 is off.",
        ),
    ] = 0
    min_tokens: Annotated[
        int, rule_option(metavar="N", help="The answer cannot end before it has so many tokens.")
    ] = 0
    logit_bias: Annotated[
        Any,
        rule_option(
            parser=_biases,
            metavar="ID=BIAS[,...]",
            help="Add to the logits of these tokens: 13=-2.5 makes token 13 less likely. [bold]--json[/] "
            "shows the ids of an answer.",
        ),
    ] = None
    allowed_token_ids: Annotated[
        Any,
        rule_option(parser=_token_ids, metavar="ID[,...]", help="No other tokens than these may come."),
    ] = None
    stop_token_ids: Annotated[
        Any,
        rule_option(
            parser=_token_ids,
            metavar="ID[,...]",
            help="Tokens that end the answer, in which they are the last, also with [bold]--ignore-eos[/].",
        ),
    ] = None


def engine_config(options: EngineOptions, **others: Any) -> EngineConfig:
    """The config that options come to. others: fields that are no options. Raises RequestError."""
    return EngineConfig(**_given(options, EngineConfig) | others)


def sampling_params(options: RequestOptions) -> SamplingParams:
    """The parameters that options come to, whatever the model. Raises RequestError."""
    return SamplingParams(**_given(options, SamplingParams))


def sampling_overrides(options: SampledOptions, **others: Any) -> SamplingOverrides:
    """The parameters that options set over the model's. others: further fields. Raises RequestError."""
    return SamplingOverrides(_given(options, SamplingParams) | others, options.greedy)


def _given(options: EngineOptions, wanted: type[EngineConfig | SamplingParams]) -> dict[str, Any]:
    """The options that are fields of `wanted`, by name, but for those that keep its default."""
    names = {field.name for field in fields(wanted)}
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name in names}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }


def _with_default(options: type[EngineOptions], parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter with the default that the help shows in a command with these options."""
    option = parameter.annotation.__metadata__[0]
    if not (issubclass(options, SampledOptions) and parameter.name in FROM_MODEL):
        return parameter
    shown = copy(option)
    shown.show_default = f"the model's, or {option.show_default}"
    return parameter.replace(annotation=Annotated[parameter.annotation.__origin__, shown])


def takes_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer is to see it: all fields of its class of options in place of `options`."""
    own = inspect.signature(command).parameters
    options: Any = own["options"].annotation
    shared = {
        name: _with_default(options, one) for name, one in inspect.signature(options).parameters.items()
    }

    @wraps(command)
    def run(**given: Any) -> None:
        command(options=options(**{name: given.pop(name) for name in shared}), **given)

    parameters = [shared.values() if name == "options" else (parameter,) for name, parameter in own.items()]
    vars(run)["__signature__"] = inspect.Signature(list(chain.from_iterable(parameters)))
    return run

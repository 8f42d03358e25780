"""What a caller can ask for: sampling parameters and the engine's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, get_args

from offspec.core.constraint import Constraint as Constraint
from offspec.core.errors import RequestError
from offspec.core.setting import (
    GROUPS,
    PLANS,
    RUNS,
    Setting,
    check_keywords,
    check_settings,
    declared,
    drafting,
    machine,
    output,
    rule,
    sampling,
    settings_of,
)
from offspec.core.values import parse_bytes, shown

Verify = Literal["coupled", "plain", "sequoia"]
Tree = Literal["dynamic", "sequoia"]
Experts = Literal["auto", "gpu", "cpu"]
Dtype = Literal["bfloat16", "float32"]
DraftBits = Literal[2, 3, 4, 16]
PackFormat = Literal["nf4", "int8", "int4-g64"]
KVCache = Literal["model", "int8"]

AUTO, NONE, SUBSTITUTE = "auto", "none", "substitute"
LOOKUPS = ("suffix", "lookup")  # sources that copy from the text, and need no weights
EARLY_EXIT, MTP = "early-exit", "mtp"  # layers of the target itself
SOURCES = {  # what `draft` takes beside models and heads, and what that means
    AUTO: "the best there is",
    NONE: "one token a pass",
    SUBSTITUTE: "a copy of the target in few bits",
    "suffix": "whatever can be copied from the text",
    "lookup": "the same, by the last few words alone",
    EARLY_EXIT: "those layers of the target that stay in memory",
    MTP: "the module that some checkpoints ship for it",
}


def read_drafts(text: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """The sources that `draft` names: one, or several joined by commas.

    A comma in the path of something that exists does not part it. Raises RequestError for an empty name, one
    that is named twice, and "auto" or "none" beside others.
    """
    given = str(text) if isinstance(text, str | Path) else ",".join(map(str, text))
    names = _parted(given)
    if not names or not all(names):
        raise RequestError(f"a name is missing in `draft` {given!r}: write suffix,substitute for two sources")
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise RequestError(f"`draft` names {twice[0]} twice; once is enough")
    for alone in (AUTO, NONE):
        if alone in names and len(names) > 1:
            raise RequestError(f'`draft="{alone}"` stands alone: leave it out, or the others')
    return tuple(names)


def check_draws(drafts: Sequence[str]) -> None:
    """Raises RequestError where these sources cannot draw what `verify="sequoia"` verifies."""
    if len(drafts) > 1 or drafts[0] in LOOKUPS:
        raise RequestError(
            '`verify="sequoia"` takes one draft that knows how likely every token is, not '
            f'{",".join(drafts)}: name a model or a head alone, or take `verify="coupled"`'
        )


def _parted(text: str) -> list[str]:
    """Names between commas, but for those commas that are part of a path."""
    parts, names = text.split(","), list[str]()
    while parts:
        longest = next((n for n in range(len(parts), 1, -1) if _exists(",".join(parts[:n]))), 1)
        names.append(",".join(parts[:longest]).strip())
        del parts[:longest]
    return names


def _exists(path: str) -> bool:
    try:
        return Path(path.strip()).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown ~user, a NUL
        return False


_FAR = 1e9  # what is added to logits or multiplies them: they are to stay finite in float32


@declared
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop; names and meanings as in vLLM.

    Applied in this order: bias, penalties, closed tokens, temperature, top_k, top_p, min_p.

    Args:
        temperature: 0 takes the likeliest token; higher values sample more freely.
        top_p: Sample from the likeliest tokens that together have this probability.
        top_k: Sample from the K likeliest tokens; 0 is off.
        min_p: Exclude tokens less likely than this share of the likeliest one's probability.
        repetition_penalty: Values above 1 make tokens of the prompt and the answer less likely to repeat.
        presence_penalty: Subtracted from the logit of every token that is in the answer.
        frequency_penalty: Subtracted once for each time the token is in the answer.
        seed: The same seed gives the same answer. Without it a random one is chosen and reported.
        max_tokens: Stop after this many tokens.
        stop: Stop before this text.
        ignore_eos: Continue after the model's end-of-sequence token.
        bad_words: Never say this, at the start of a word or within it.
        no_repeat_ngram_size: Never say the same N tokens in a row twice, those of the prompt included; 0 is
            off.
        min_tokens: The answer cannot end before it has so many tokens.
        logit_bias: Add to the logits of these tokens: 13=-2.5 makes token 13 less likely. `--json` shows the
            ids of an answer.
        allowed_token_ids: No other tokens than these may come.
        stop_token_ids: Tokens that end the answer, in which they are the last, also with `ignore_eos`.
        logprobs: Report for each token the log-probability that the model itself gives it, and this many of
            the likeliest tokens. None: do not.
        prompt_logprobs: Report the same for each token of the prompt, all of which is computed then, whatever
            the caches hold of it. None: do not.
        format: What the whole answer must look like, such as a JSON schema; also a mapping of its kind and
            text. An answer that `max_tokens` or `stop` cuts has only begun to. None: anything.

    Raises:
        RequestError: A value of another type, or outside its range.
    """

    temperature: Annotated[float, sampling("T", least=0, saved=True, chat=True, commands=PLANS)] = 0.0
    top_p: Annotated[float, sampling("P", above=0, most=1, chat=True)] = 1.0
    top_k: Annotated[int, sampling("K", least=0, wanted="0 (off) or above", chat=True)] = 0
    min_p: Annotated[float, sampling("P", least=0, most=1, chat=True)] = 0.0
    repetition_penalty: Annotated[
        float, sampling("X", least=1 / _FAR, most=_FAR, wanted="above 0 and at most 10^9", chat=True)
    ] = 1.0
    presence_penalty: Annotated[
        float, sampling("X", least=-_FAR, most=_FAR, wanted="between -10^9 and 10^9", chat=True)
    ] = 0.0
    frequency_penalty: Annotated[
        float, sampling("X", least=-_FAR, most=_FAR, wanted="between -10^9 and 10^9", chat=True)
    ] = 0.0
    seed: Annotated[
        int | None, sampling("N", least=0, most=2**64 - 1, wanted="between 0 and 2^64 - 1", chat=True)
    ] = None
    max_tokens: Annotated[int, output("N", least=1, chat=True)] = 256
    stop: Annotated[tuple[str, ...], output("TEXT", chat=True)] = ()
    ignore_eos: Annotated[bool, output(chat=True)] = False
    stop_token_ids: Annotated[tuple[int, ...], rule("ID[,...]")] = ()
    min_tokens: Annotated[int, rule("N", least=0, wanted="between 0 and max_tokens", chat=True)] = 0
    logit_bias: Annotated[tuple[tuple[int, float], ...], rule("ID=BIAS[,...]")] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, rule("ID[,...]")] = None
    bad_words: Annotated[tuple[str, ...], rule("TEXT", chat=True)] = ()
    no_repeat_ngram_size: Annotated[int, rule("N", least=0, wanted="0 (off) or above", chat=True)] = 0
    logprobs: Annotated[int | None, Setting(least=0, wanted="None, or 0 or above")] = None
    prompt_logprobs: Annotated[int | None, Setting(least=0, wanted="None, or 0 or above")] = None
    format: Annotated[Constraint | None, Setting()] = None

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "format", Constraint.of(self.format))
        for ok, name, wanted in (
            (self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens"),
            (all(abs(by) <= _FAR for _, by in self.logit_bias), "logit_bias", "numbers within ±10^9"),
            (self.allowed_token_ids != (), "allowed_token_ids", "None, or at least one token"),
            (
                not (self.format and self.ignore_eos),
                "ignore_eos",
                "False where there is a format, which ends",
            ),
        ):
            if not ok:
                raise RequestError(f"{name} must be {wanted}, not {shown(getattr(self, name))}", field=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalises(self) -> bool:
        """Whether a token that was said before is scored otherwise."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def checked_params(params: object) -> SamplingParams:
    """The parameters of a request, by default greedy ones. Raises RequestError for anything else."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"params must be SamplingParams, as in SamplingParams(temperature=0.7), not {shown(params)}"
        )
    return params or SamplingParams()


def check_comparable(verify: Verify, params: SamplingParams) -> None:
    """Raises RequestError where `check` cannot compare tokens, because they depend on the draft."""
    if verify == "sequoia" and not params.greedy:
        raise RequestError(
            '`check` compares tokens, and those of `verify="sequoia"` depend on the draft: take '
            '`verify="coupled"`, or `temperature=0`'
        )


PARAMS = tuple(field.name for field in fields(SamplingParams))
FOR_PARAMS = "a request takes it in its parameters, as in engine.generate(prompt, SamplingParams({}=...))"


class Settings(TypedDict, total=False):
    """Settings of `EngineConfig` for type checkers, as a caller may write them: sizes like "1.5GB".

    tests/core/test_setting.py compares them with the fields.
    """

    draft: str | Path | Sequence[str | Path]
    draft_bits: DraftBits | None
    memory: str | int | None
    vram: str | int | None
    cpu_layers: int | None
    experts: Experts
    device: str
    dtype: Dtype
    kv_cache: KVCache
    budget: int | None
    width: int | None
    context: int | None
    verify: Verify
    tree: Tree
    temperature: float
    learn: bool
    converses: bool
    quantize: PackFormat | None
    corpus: str | Path | Sequence[str | Path]
    cache_size: str | int
    sequences: int | Literal["auto"]


@declared
@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is decided before a model is opened.

    Args:
        model: The target: a hub id, with `:Q4_K_M` for one of its GGUF files, a local folder, a `.gguf` file,
            `demo`, the small model that `make env` installs, or `demo-wide`, that one made 16 times as large.
            `offspec config set model` makes one the default.
        draft: Draft sources, one or several with commas between: a small model or a trained head (folder,
            file or hub id); `substitute`, a copy of the target in 4 bits or fewer; `suffix` or `lookup`,
            which copy from the text; `early-exit` or `mtp`, layers of the target itself. `auto` selects the
            best available; `none` turns speculation off.
        draft_bits: Bits of the draft's weights: fewer take less memory and predict worse. Without it a named
            draft keeps its own precision, and a substitute has 4, 3 or 2, the most that fit.
        memory: Memory limit of the whole process, such as 1.5GB or 800MiB. What does not fit streams from
            disk in every pass. None: what the machine has free.
        vram: The most memory of the GPU, or of each, that may be used. What does not fit there comes from
            RAM, and what does not fit in RAM from disk. None: most of what the GPU has free.
        device: Where to compute. `auto` takes a GPU that is usable, else the CPU, and says which and why.
            `cuda:0,cuda:1` divides the layers among two GPUs, `all` among all there are; drafts run on the
            first.
        cpu_layers: Layers that stay in RAM and are computed by the CPU instead of being copied to the GPU:
            faster with small trees, as `offspec plan` shows, slower with long prompts. A CPU rounds in
            another way, so in bfloat16 or with `kv_cache="int8"` answers depend on this number, and None
            takes none; in float32 it takes as many as are fastest.
        experts: What computes the experts of a mixture beside a GPU. `gpu`: itself; those that it has no room
            for are copied to it when a router chooses them. `cpu`: the CPU, all of them from RAM, and only
            rows cross to the GPU and back: faster with small trees where the GPU has room for few, slower
            with long prompts. A CPU rounds in another way, so in bfloat16 or with `kv_cache="int8"` answers
            depend on it, and `auto` takes the GPU; in float32 it takes what a plan says is faster.
        dtype: Number format of weights and arithmetic. float32 doubles the bytes and rounds less.
        context: Room for this many tokens of prompt and answer. None: as much as fits, within reason.
        kv_cache: How the target keeps the keys and values of its context: in the numbers of the `model`, or
            in `int8`, about half the memory and slightly different answers.
        quantize: Round the target to fewer bits and run that: fewer bytes to stream, slightly different
            answers. Done once, as by `offspec pack`, and kept in the cache.
        cache_size: Disk space in the cache for conversations: their keys and values are written there when
            another takes their place and when the program ends, and read where that is quicker than to
            compute the prompt again. Other users cannot read them. 0 keeps none, as is usual; `offspec serve`
            keeps 4 GB unless it is told otherwise.
        corpus: Text that `suffix` may copy from as well: files, saved conversations, or folders of them.
        budget: The most tree nodes verified in one pass. More nodes cost compute, and pay off while the disk
            is the slower part; None takes the fastest by a plan, which is made on first use.
        width: Tree nodes that one draft step expands; None takes the fastest by the plan. With a number here
            and for `budget` nothing is planned: trees are as large as that, but for times when passes without
            any are seen to be faster.
        tree: `dynamic` grows every tree along its likeliest paths; `sequoia` uses one shape, optimised for
            the measured acceptance of this draft.
        verify: Verification rule. `coupled`: draft and target share the sampling noise, so that drafts are
            accepted at any temperature. `plain`: the draft ranks by probability alone, as in SpecExec; for
            comparison. `sequoia`: the draft samples tokens of its own, for `tree="sequoia"`; the distribution
            is the target's, but the tokens depend on the draft.
        temperature: Temperature that a plan is made for; each request has its own.
        learn: Whether what answers teach about the draft is kept for the next run.
        converses: Where the context is not given, room for a conversation goes before a faster draft.
        sequences: Requests that are answered side by side: they share the trips of the weights, and each
            takes memory for a context of its own. `auto` takes up to 8, as many as cost hardly a layer its
            place in memory.

    Raises:
        RequestError: A value of another type, or outside its range, or two that exclude each other.
    """

    model: Annotated[str, machine("MODEL", saved=True)]
    draft: Annotated[str, drafting("NAME|PATH[,...]|auto|none", saved=True, commands=PLANS)] = "auto"
    draft_bits: Annotated[DraftBits | None, drafting("2|3|4|16", saved=True, commands=PLANS)] = None
    memory: Annotated[int | None, machine(unit="bytes", above=0, saved=True)] = None
    vram: Annotated[int | None, machine(unit="bytes", above=0, saved=True)] = None
    cpu_layers: Annotated[int | None, machine("LAYERS|auto", unit="layers", auto=True, least=0)] = None
    experts: Annotated[Experts, machine()] = "auto"
    device: Annotated[str, machine("auto|cpu|cuda|all", saved=True)] = "auto"
    dtype: Annotated[Dtype, machine(saved=True, plan="record")] = "bfloat16"
    kv_cache: Annotated[KVCache, machine(saved=True, plan="record")] = "model"
    budget: Annotated[
        int | None, drafting("NODES|auto", unit="nodes", auto=True, least=1, because="the root is a node too")
    ] = None
    width: Annotated[int | None, drafting("NODES|auto", unit="nodes", auto=True, least=1)] = None
    context: Annotated[int | None, machine("TOKENS", least=2, saved=True)] = None
    verify: Annotated[Verify, drafting()] = "coupled"
    tree: Annotated[Tree, drafting(plan="record")] = "dynamic"
    temperature: Annotated[float, Setting()] = 0.0
    learn: Annotated[bool, Setting(plan="none")] = True
    converses: Annotated[bool, Setting()] = False
    quantize: Annotated[
        PackFormat | None,
        machine(wanted=f"one of {', '.join(get_args(PackFormat))}", saved=True, plan="record"),
    ] = None
    corpus: Annotated[tuple[Path, ...], drafting("FILE|FOLDER", option="draft-corpus", plan="none")] = ()
    cache_size: Annotated[
        int, machine(unit="bytes", least=0, wanted="0 (none) or above", plan="none", commands=RUNS)
    ] = 0
    sequences: Annotated[
        int | Literal["auto"],
        machine(
            "N|auto",
            unit="sequences",
            auto=True,
            least=1,
            wanted="1 or above, or auto",
            commands=("serve", "batch"),
        ),
    ] = 1

    @classmethod
    def of(cls, model: str | Path, settings: Settings) -> "EngineConfig":
        """A configuration from settings as a caller writes them. Raises RequestError."""
        given: dict[str, Any] = dict(settings)
        check_keywords(given, Settings.__annotations__, "setting", {FOR_PARAMS: PARAMS})
        if isinstance(given.get("draft"), list | tuple):
            given["draft"] = ",".join(map(str, given["draft"]))
        for name, setting in settings_of(cls).items():
            if setting.unit == "bytes" and given.get(name) is not None:
                given[name] = parse_bytes(given[name], name, least=int(setting.least is None))
        return cls(model, **given)  # type: ignore[arg-type] # a path becomes a string

    @property
    def drafts(self) -> tuple[str, ...]:
        """The sources that are named, in order; the first that is no lookup is what plans are made for."""
        return read_drafts(self.draft)

    @property
    def substitutes(self) -> bool:
        """Whether the target itself, in few bits, is among the sources."""
        return SUBSTITUTE in self.drafts

    @property
    def chooses_cpu_layers(self) -> bool:
        """Whether a plan may have the CPU compute layers beside a GPU without being asked to.

        In bfloat16 it may not, nor with keys in int8: answers would depend on what the plan was made for,
        budget and draft too.
        """
        return self.cpu_layers is None and self._exact and self.device != "cpu"

    @property
    def chooses_experts(self) -> bool:
        """Whether a plan may have the CPU compute experts beside a GPU, by the same rule."""
        return self.experts == AUTO and self._exact and self.device != "cpu" and not self.cpu_layers

    @property
    def _exact(self) -> bool:
        """Whether answers are taken to be the same however products are rounded."""
        return self.dtype == "float32" and self.kv_cache == "model"

    @property
    def least_sequences(self) -> int:
        """Sequences that there must be room for."""
        return 1 if self.sequences == AUTO else int(self.sequences)

    def __post_init__(self) -> None:
        check_settings(self)
        drafts = self.drafts
        if self.experts == "cpu" and self.cpu_layers:
            raise RequestError("the CPU computes layers or experts: leave out `cpu_layers` or `experts`")
        if self.verify == "sequoia":
            if self.tree != "sequoia":
                raise RequestError(
                    '`verify="sequoia"` holds for trees of one shape alone: add `tree="sequoia"`'
                )
            check_draws(drafts)
        if (AUTO in drafts or SUBSTITUTE in drafts) and self.draft_bits == 16:
            raise RequestError("a substitute has 4, 3 or 2 bits: leave out `draft_bits`, or name a draft")


PLANNED = tuple(name for name, setting in settings_of(EngineConfig).items() if setting.plan == "record")
# Settings that have an option, in the order of the help. `temperature` is that of a request.
OPTIONS = {
    name: setting
    for group in GROUPS
    for name, setting in (settings_of(EngineConfig) | settings_of(SamplingParams)).items()
    if setting.group == group
}

"""Sampling parameters of a request and configuration of the engine."""

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
from offspec.core.values import parse_bytes, short_repr

Verify = Literal["coupled", "plain", "sequoia"]
Tree = Literal["dynamic", "sequoia"]
Experts = Literal["auto", "gpu", "cpu"]
Dtype = Literal["bfloat16", "float32"]
DraftBits = Literal[2, 3, 4, 16]
PackFormat = Literal["nf4", "int8", "int4-g64"]
KVCache = Literal["model", "int8"]

AUTO, NONE, SELF_DRAFT = "auto", "none", "self"
FORMER_SELF_DRAFT = "substitute"  # accepted instead of SELF_DRAFT, and part of the keys of saved plans
LOOKUPS = ("suffix", "lookup")  # sources that copy from the text and need no weights
EARLY_EXIT, MTP = "early-exit", "mtp"  # layers of the target itself
SOURCES = {  # values of `draft` other than models and heads, with their meaning
    AUTO: "the best available source",
    NONE: "no speculation, one token per pass",
    SELF_DRAFT: "the quantized target (self-draft)",
    "suffix": "suffix-automaton lookup in the text",
    "lookup": "prompt lookup (n-gram) in the text",
    EARLY_EXIT: "the target's layers that stay in memory",
    MTP: "the multi-token prediction module of the checkpoint",
}


def read_drafts(text: str | Path | Sequence[str | Path]) -> tuple[str, ...]:
    """Return the draft sources that `draft` names: one, or several joined by commas.

    A comma inside an existing path does not separate names. Raises RequestError if a name is empty or
    repeated, or if "auto" or "none" is combined with others.
    """
    given = str(text) if isinstance(text, str | Path) else ",".join(map(str, text))
    names = _split_names(given)
    if not names or not all(names):
        raise RequestError(f"`draft` {given!r} has an empty name: write two sources as suffix,early-exit")
    twice = [name for at, name in enumerate(names) if name in names[:at]]
    if twice:
        raise RequestError(f"`draft` names {twice[0]} twice: name each source once")
    for alone in (AUTO, NONE):
        if alone in names and len(names) > 1:
            raise RequestError(
                f'`draft="{alone}"` cannot be combined with other sources: omit it or the others'
            )
    return tuple(names)


def check_sequoia_drafts(drafts: Sequence[str]) -> None:
    """Raise RequestError if these sources cannot sample the draft tokens that `verify="sequoia"` needs."""
    if len(drafts) > 1 or drafts[0] in LOOKUPS:
        raise RequestError(
            '`verify="sequoia"` needs a single draft that gives the probability of every token, not '
            f'{",".join(drafts)}: name one model or head, or use `verify="coupled"`'
        )


def _split_names(text: str) -> list[str]:
    """Split at commas, except those inside an existing path."""
    parts, names = text.split(","), list[str]()
    while parts:
        longest = next((n for n in range(len(parts), 1, -1) if _exists(",".join(parts[:n]))), 1)
        names.append(",".join(parts[:longest]).strip())
        del parts[:longest]
    return [SELF_DRAFT if name == FORMER_SELF_DRAFT else name for name in names]


def _exists(path: str) -> bool:
    try:
        return Path(path.strip()).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # too long a name, an unknown ~user, a NUL
        return False


_FAR = 1e9  # limit of penalties and biases, so that logits stay finite in float32


@declared
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters and stop conditions of a request; names and meanings as in vLLM.

    Applied in this order: bias, penalties, forbidden tokens, temperature, top_k, top_p, min_p.

    Args:
        temperature: Sampling temperature; 0 is greedy, and higher values give more varied answers.
        top_p: Keep the smallest set of most likely tokens with at least this total probability (nucleus
            sampling).
        top_k: Keep the K most likely tokens; 0 disables it.
        min_p: Drop tokens less likely than this fraction of the most likely token's probability.
        repetition_penalty: Penalty for repeating tokens of the prompt or the answer, if above 1.
        presence_penalty: Amount subtracted from the logit of every token that is already in the answer.
        frequency_penalty: Amount subtracted from a token's logit for each time it is in the answer.
        seed: Random seed; the same seed gives the same answer. None: a random seed, which is reported.
        max_tokens: Maximum number of tokens to generate.
        stop: Text that ends the answer and is not part of it.
        ignore_eos: Continue after the model's end-of-sequence token.
        bad_words: Text that the answer may not contain, at the start of a word or within it.
        no_repeat_ngram_size: Forbid repeating any N consecutive tokens of the prompt or the answer; 0
            disables it.
        min_tokens: Minimum number of tokens before the answer may end.
        logit_bias: Amounts added to the logits of tokens: 13=-2.5 makes token 13 less likely. `--json` prints
            the token ids of an answer.
        allowed_token_ids: Ids of the only tokens that may be generated.
        stop_token_ids: Ids of tokens that end the answer, even with `ignore_eos`. The answer includes them.
        logprobs: Number of most likely tokens to report at each position of the answer, with their
            log-probabilities and the chosen token's, before penalties and temperature. None: off.
        prompt_logprobs: Number of most likely tokens to report at each position of the prompt, as in
            `logprobs`. The whole prompt is then computed, even if it is cached. None: off.
        format: Format of the whole answer, such as a JSON schema: a Constraint, or a mapping of its kind and
            text. An answer that `max_tokens` or `stop` cuts off is incomplete. None: any text.

    Raises:
        RequestError: A value has the wrong type or is out of range, or two values exclude each other.
    """

    temperature: Annotated[float, sampling("T", least=0, saved=True, chat=True, commands=PLANS)] = 0.0
    top_p: Annotated[float, sampling("P", above=0, most=1, chat=True)] = 1.0
    top_k: Annotated[int, sampling("K", least=0, expected="0 (off) or above", chat=True)] = 0
    min_p: Annotated[float, sampling("P", least=0, most=1, chat=True)] = 0.0
    repetition_penalty: Annotated[
        float, sampling("X", least=1 / _FAR, most=_FAR, expected="above 0 and at most 10^9", chat=True)
    ] = 1.0
    presence_penalty: Annotated[
        float, sampling("X", least=-_FAR, most=_FAR, expected="between -10^9 and 10^9", chat=True)
    ] = 0.0
    frequency_penalty: Annotated[
        float, sampling("X", least=-_FAR, most=_FAR, expected="between -10^9 and 10^9", chat=True)
    ] = 0.0
    seed: Annotated[
        int | None, sampling("N", least=0, most=2**64 - 1, expected="between 0 and 2^64 - 1", chat=True)
    ] = None
    max_tokens: Annotated[int, output("N", least=1, chat=True)] = 256
    stop: Annotated[tuple[str, ...], output("TEXT", chat=True)] = ()
    ignore_eos: Annotated[bool, output(chat=True)] = False
    stop_token_ids: Annotated[tuple[int, ...], rule("ID[,...]")] = ()
    min_tokens: Annotated[int, rule("N", least=0, chat=True)] = 0
    logit_bias: Annotated[tuple[tuple[int, float], ...], rule("ID=BIAS[,...]")] = ()
    allowed_token_ids: Annotated[tuple[int, ...] | None, rule("ID[,...]")] = None
    bad_words: Annotated[tuple[str, ...], rule("TEXT", chat=True)] = ()
    no_repeat_ngram_size: Annotated[int, rule("N", least=0, expected="0 (off) or above", chat=True)] = 0
    logprobs: Annotated[int | None, Setting(least=0, expected="None, or 0 or above")] = None
    prompt_logprobs: Annotated[int | None, Setting(least=0, expected="None, or 0 or above")] = None
    format: Annotated[Constraint | None, Setting()] = None

    def __post_init__(self) -> None:
        check_settings(self)
        object.__setattr__(self, "format", Constraint.of(self.format))
        for ok, name, wanted in (
            (
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"between 0 and max_tokens ({self.max_tokens})",
            ),
            (all(abs(by) <= _FAR for _, by in self.logit_bias), "logit_bias", "numbers within ±10^9"),
            (self.allowed_token_ids != (), "allowed_token_ids", "None, or at least one token"),
            (
                not (self.format and self.ignore_eos),
                "ignore_eos",
                "False if there is a format, which ends the answer",
            ),
        ):
            if not ok:
                raise RequestError(
                    f"{name} must be {wanted}, not {short_repr(getattr(self, name))}", field=name
                )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty changes the logits of tokens that occurred before."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def checked_params(params: object) -> SamplingParams:
    """Return the parameters of a request, greedy ones for None. Raises RequestError for another type."""
    if not isinstance(params, SamplingParams | None):
        raise RequestError(
            f"params must be SamplingParams, as in SamplingParams(temperature=0.7), not {short_repr(params)}"
        )
    return params or SamplingParams()


def check_comparable(verify: Verify, params: SamplingParams) -> None:
    """Raise RequestError if `check` cannot compare tokens because they depend on the draft."""
    if verify == "sequoia" and not params.greedy:
        raise RequestError(
            '`check` compares tokens, but with `verify="sequoia"` sampled tokens depend on the draft: use '
            '`verify="coupled"` or `temperature=0`'
        )


PARAMS = tuple(field.name for field in fields(SamplingParams))
FOR_PARAMS = "it is a sampling parameter of a request, as in engine.generate(prompt, SamplingParams({}=...))"


class Settings(TypedDict, total=False):
    """Settings of `EngineConfig` for type checkers, as a caller may write them: sizes like "1.5GB".

    tests/core/test_setting.py compares the keys with the fields.
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
    """Configuration of an engine, fixed before the model is opened.

    Args:
        model: Target model: a Hugging Face id (`ID:Q4_K_M` for one of its GGUF files), a folder, a `.gguf`
            file, `demo` or `demo-wide`. `offspec config set model` sets a default.
        draft: Comma-separated draft sources: a draft model or head (folder, file or Hugging Face id),
            `self` (quantized self-draft), `suffix`, `lookup`, `early-exit`, `mtp`. `auto` selects the
            best available; `none` disables speculation.
        draft_bits: Bits per weight of the draft; fewer save memory and lower the acceptance rate. None: a
            named draft's own precision, and 4, 3 or 2 for a self-draft.
        memory: Memory limit of the whole process, such as 1.5GB or 800MiB. Weights that do not fit are
            streamed from disk in every pass. None: all free memory.
        vram: Memory limit of each GPU. Weights that do not fit are streamed from RAM or disk. None: most of
            the GPU's free memory.
        device: Compute device. `auto` selects a usable GPU, else the CPU; `cuda:0,cuda:1` divides the layers
            between two GPUs, and `all` among all GPUs.
        cpu_layers: Layers computed by the CPU from RAM instead of being copied to the GPU: faster with small
            trees, slower with long prompts. None selects 0; in float32, the fastest number.
        experts: Device that computes the experts of an MoE model: `gpu` copies them on demand, `cpu` computes
            all of them from RAM. `auto` selects `gpu`; in float32, the faster device.
        dtype: Data type of weights and computation. float32 takes twice the memory and is more precise.
        context: Context size in tokens (prompt and answer). None: up to 4,096, as memory allows.
        kv_cache: Data type of the target's KV cache: the `model`'s own, or `int8` (about half the memory,
            slightly different answers).
        quantize: Quantize the target once, cached like `offspec pack`, and run that: less data to stream,
            slightly different answers.
        cache_size: Disk space for the KV caches of evicted conversations; 0 disables it. Default: 0, or 4 GB
            in `offspec serve`.
        corpus: Text file, saved conversation, or folder of them, that `suffix` may also copy from.
        budget: Maximum tree size in nodes per pass. Larger trees pay off while the weight transfer is the
            bottleneck. None uses the plan.
        width: Tree nodes expanded per draft step. None uses the plan; numbers for both `width` and `budget`
            disable planning.
        tree: Tree shape: `dynamic` follows the most likely paths; `sequoia` is one fixed shape, optimized for
            the draft's measured acceptance rate.
        verify: Verification rule: `coupled` shares sampling noise between draft and target, `plain` does not
            (SpecExec). `sequoia` needs `tree="sequoia"`; it keeps the target's distribution, but tokens
            depend on the draft.
        temperature: Temperature that the plan is made for; each request has its own.
        learn: Whether calibration of the draft from answers is saved for later runs.
        converses: Whether a default context size leaves room for a conversation before a faster draft.
        sequences: Maximum number of concurrent requests (continuous batching); each takes memory for its own
            context. `auto` selects up to 8, depending on memory.

    Raises:
        RequestError: A value has the wrong type or is out of range, or two values exclude each other.
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
        int | None, drafting("NODES|auto", unit="nodes", auto=True, least=1, reason="the root is a node too")
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
        machine(expected=f"one of {', '.join(get_args(PackFormat))}", saved=True, plan="record"),
    ] = None
    corpus: Annotated[tuple[Path, ...], drafting("FILE|FOLDER", option="draft-corpus", plan="none")] = ()
    cache_size: Annotated[
        int, machine(unit="bytes", least=0, expected="0 (none) or above", plan="none", commands=RUNS)
    ] = 0
    sequences: Annotated[
        int | Literal["auto"],
        machine(
            "N|auto",
            unit="sequences",
            auto=True,
            least=1,
            expected="1 or above, or auto",
            commands=("serve", "batch"),
        ),
    ] = 1

    @classmethod
    def of(cls, model: str | Path, settings: Settings) -> "EngineConfig":
        """Return a configuration from settings as a caller writes them. Raises RequestError."""
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
        """Draft sources in the order given. Plans are made for the first that is not a lookup."""
        return read_drafts(self.draft)

    @property
    def uses_self_draft(self) -> bool:
        """Whether the quantized target itself is among the draft sources."""
        return SELF_DRAFT in self.drafts

    @property
    def plans_cpu_layers(self) -> bool:
        """Whether a plan may by default assign layers to the CPU when there is a GPU.

        False in bfloat16 and with an int8 KV cache, because answers would then depend on the plan's inputs,
        including budget and draft.
        """
        return self.cpu_layers is None and self._exact and self.device != "cpu"

    @property
    def plans_cpu_experts(self) -> bool:
        """Whether a plan may by default assign experts to the CPU, under the rule of `plans_cpu_layers`."""
        return self.experts == AUTO and self._exact and self.device != "cpu" and not self.cpu_layers

    @property
    def _exact(self) -> bool:
        """Whether rounding differences between devices are assumed not to change answers."""
        return self.dtype == "float32" and self.kv_cache == "model"

    @property
    def min_sequences(self) -> int:
        """Minimum number of sequences that memory must hold."""
        return 1 if self.sequences == AUTO else int(self.sequences)

    def __post_init__(self) -> None:
        check_settings(self)
        drafts = self.drafts
        if FORMER_SELF_DRAFT in self.draft:
            object.__setattr__(self, "draft", ",".join(drafts))
        if self.experts == "cpu" and self.cpu_layers:
            raise RequestError(
                "the CPU cannot compute both layers and experts: omit `cpu_layers` or `experts`"
            )
        if self.verify == "sequoia":
            if self.tree != "sequoia":
                raise RequestError('`verify="sequoia"` needs trees of one fixed shape: add `tree="sequoia"`')
            check_sequoia_drafts(drafts)
        if (AUTO in drafts or SELF_DRAFT in drafts) and self.draft_bits == 16:
            raise RequestError(
                "a self-draft has 4, 3 or 2 bits, not 16: omit `draft_bits`, or name a draft model"
            )


PLANNED = tuple(name for name, setting in settings_of(EngineConfig).items() if setting.plan == "record")
# Settings that have an option, in the order of the help. `temperature` is the sampling parameter.
OPTIONS = {
    name: setting
    for group in GROUPS
    for name, setting in (settings_of(EngineConfig) | settings_of(SamplingParams)).items()
    if setting.group == group
}

"""What a caller can ask for: sampling parameters, byte budgets, the engine's configuration."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from offspec.core.constraint import Constraint as Constraint
from offspec.core.errors import RequestError
from offspec.core.keywords import check_keywords
from offspec.core.values import read_fields, read_value, shown
from offspec_planners.units import format_bytes as format_bytes

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

Verify = Literal["coupled", "plain", "sequoia"]
Tree = Literal["dynamic", "sequoia"]
Experts = Literal["auto", "gpu", "cpu"]
Dtype = Literal["bfloat16", "float32"]
DraftBits = Literal[2, 3, 4, 16]
PackFormat = Literal["nf4", "int8", "int4-g64"]
KVCache = Literal["model", "int8"]


_FEWEST_BYTES = 10**6  # a smaller number that is typed without a unit was meant in another one


def parse_bytes(text: str | int, name: str = "a memory size", least: int = 1) -> int:
    """Bytes, `least` or more, from `"1.5GB"`, `"800MiB"`, `"12G"` or a plain number.

    Raises RequestError, also for text without a unit that can hardly be meant in bytes.
    """
    wanted = "above 0" if least else "0 or above"
    if not isinstance(text, str):
        size: int = read_value(name, text, int, "a size such as 1.5GB, or a whole number of bytes")
        if size < least:
            raise RequestError(f"a memory size must be {wanted}, not {size}")
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if not match or (match[3] and not match[2]):
        raise RequestError(f"cannot read {text!r} as a memory size; write it like 1.5GB or 800MiB")
    units = _BINARY if match[3] else _UNITS
    size = int(float(match[1]) * units[match[2].upper()])
    if 0 < float(match[1]) < _FEWEST_BYTES and text.strip()[-1].isdigit():
        raise _without_unit(match[1])
    if size < least:
        raise RequestError(f"a memory size must be {wanted}, not {text!r}")
    return size


def _without_unit(number: str) -> RequestError:
    """The error for a number without a unit that is too small for a number of bytes."""
    meant = f"{number}GB" if float(number) < 1024 else f"{number}MB"
    return RequestError(f"a memory size of {number} means {number} bytes: write {meant}")


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


def is_unicode(text: str) -> bool:
    """Whether a text can be written in UTF-8, which one with half of a character in it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_FAR = 1e9  # what is added to logits or multiplies them: they are to stay finite in float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen, and when to stop; names and meanings as in vLLM.

    Applied in this order: bias, penalties, closed tokens, temperature, top_k, top_p, min_p.

    Args:
        temperature: 0 is greedy. Default 0.
        top_p: Sample from the likeliest tokens that together have this probability. Default 1, all.
        top_k: Sample from this number of likeliest tokens. Default 0, all.
        min_p: Exclude tokens less likely than this share of the likeliest one's probability. Default 0.
        repetition_penalty: Above 1, tokens of prompt and output become less likely. Default 1.
        presence_penalty: Subtracted from the logit of every token in the output. Default 0.
        frequency_penalty: Subtracted once for each time the token is in the output. Default 0.
        seed: Fixes, for a prompt and these parameters, every sampled token. None: a new seed, which the
            result reports.
        max_tokens: Longest answer. Default 256.
        stop: The answer ends before any of these texts. Default none.
        ignore_eos: Continue after the model's end-of-sequence token. Default False.
        stop_token_ids: Tokens that end the answer, whatever `ignore_eos` says; they are part of it. Default
            none.
        min_tokens: Tokens before which neither the end-of-sequence token nor `stop_token_ids` can come.
            Default 0.
        logit_bias: Numbers added to logits, by token id: a mapping, or pairs. Default none.
        allowed_token_ids: The only tokens that may come. None: all.
        bad_words: Texts whose tokens never come in a row. Default none.
        no_repeat_ngram_size: No sequence of this many tokens comes twice, prompt included. Default 0, off.
        logprobs: Report for each token the log-probability that the model itself gives it, and this many of
            the likeliest tokens. None: do not.
        prompt_logprobs: Report the same for each token of the prompt, all of which is computed then, whatever
            the caches hold of it. None: do not.
        format: What the whole answer must look like, such as a JSON schema; also a mapping of its kind and
            text. An answer that `max_tokens` or `stop` cuts has only begun to. None: anything.

    Raises:
        RequestError: A value of another type, or outside its range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    no_repeat_ngram_size: int = 0  # 0: off
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    format: Constraint | None = None

    def __post_init__(self) -> None:
        read_fields(self)
        object.__setattr__(self, "format", Constraint.of(self.format))
        checks = (
            (0.0 <= self.temperature < math.inf, "temperature", "0 or above"),
            (0.0 < self.top_p <= 1.0, "top_p", "above 0 and at most 1"),
            (self.top_k >= 0, "top_k", "0 (off) or above"),
            (0.0 <= self.min_p <= 1.0, "min_p", "between 0 and 1"),
            (1 / _FAR <= self.repetition_penalty <= _FAR, "repetition_penalty", "above 0 and at most 10^9"),
            (abs(self.presence_penalty) <= _FAR, "presence_penalty", "between -10^9 and 10^9"),
            (abs(self.frequency_penalty) <= _FAR, "frequency_penalty", "between -10^9 and 10^9"),
            (self.max_tokens >= 1, "max_tokens", "1 or above"),
            (all(self.stop), "stop", "strings that are not empty"),
            (all(map(is_unicode, self.stop)), "stop", "valid Unicode text"),
            (self.seed is None or 0 <= self.seed < 2**64, "seed", "between 0 and 2^64 - 1"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "between 0 and max_tokens"),
            (all(abs(by) <= _FAR for _, by in self.logit_bias), "logit_bias", "numbers within ±10^9"),
            (self.allowed_token_ids != (), "allowed_token_ids", "None, or at least one token"),
            (all(self.bad_words), "bad_words", "strings that are not empty"),
            (all(map(is_unicode, self.bad_words)), "bad_words", "valid Unicode text"),
            (self.no_repeat_ngram_size >= 0, "no_repeat_ngram_size", "0 (off) or above"),
            (self.logprobs is None or self.logprobs >= 0, "logprobs", "None, or 0 or above"),
            (
                self.prompt_logprobs is None or self.prompt_logprobs >= 0,
                "prompt_logprobs",
                "None, or 0 or above",
            ),
            (
                not (self.format and self.ignore_eos),
                "ignore_eos",
                "False where there is a format, which ends",
            ),
        )
        for ok, name, wanted in checks:
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
    """The settings of `EngineConfig` beside the model, as a caller may write them: sizes like "1.5GB"."""

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


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that is decided before a model is opened.

    Args:
        model: A hub id ("org/name:Q4_K_M" for a GGUF file), its address, a folder, a .gguf file, "demo" or
            "demo-wide".
        draft: Draft sources, joined by commas: a model or a head by its id or path, "substitute" (the target
            itself in few bits), "early-exit" and "mtp" (layers of its own), "suffix" and "lookup" (which copy
            from the text); "auto", the best there is, or "none".
        draft_bits: 2, 3 or 4 bits a weight of a draft that is a model, or 16, which keeps a named one in
            `dtype`. None: that, and for a substitute the most of 4, 3 and 2 that fit.
        memory: Bytes of RAM that the whole process may use. None: what the machine has free.
        vram: Bytes of a CUDA device. None: what it has free.
        cpu_layers: Layers of the target that stay in RAM and are computed by the CPU, beside a GPU that
            computes the others. A CPU rounds in another way: in bfloat16 answers depend on this number. None:
            in float32 as many as a plan says is fastest, in bfloat16 none.
        experts: What computes the routed experts of a mixture beside a GPU: "gpu", which has those copied to
            it that it has no room for; "cpu", all of them from RAM, however many the GPU has room for. In
            bfloat16 answers depend on it, as on `cpu_layers`. "auto": in float32 what a plan says is faster,
            in bfloat16 the GPU.
        device: Where the target is computed: "auto", a GPU that is usable, else the CPU; "cpu"; "cuda" or
            "cuda:1"; "cuda:0,cuda:1" or "all": several GPUs, which share its layers; `vram` is of each.
        dtype: "bfloat16" or "float32", of the values that are computed with.
        kv_cache: How the target keeps keys and values: "model", in `dtype`, or "int8", in 8 bits with a scale
            for each head of each token, which makes other answers. Drafts keep theirs in `dtype`.
        budget: Most nodes verified in a pass. None: what a plan says is fastest, measured once and kept.
        width: Most nodes that a draft step expands. None: the plan's.
        context: Tokens of KV cache to make room for. None: a default that fits.
        verify: "coupled" and "plain" emit what the target emits by itself with that seed, "plain" without
            showing the draft the target's noise; "sequoia", for trees of one shape, emits what is as likely,
            but depends on the draft.
        tree: "dynamic" grows each tree best first, "sequoia" fills one shape that was optimised beforehand.
        temperature: What a plan is made for; each request has its own.
        learn: Whether what answers teach about the draft is kept for the next run.
        converses: Where the context is not given, room for a conversation goes before a faster draft.
        quantize: Round the target's matrices to this format, once, into a pack in the cache, and run that.
            None: the target as it is.
        corpus: Text files, saved conversations and folders of them that "suffix" may copy from as well.
        cache_size: Bytes of disk, in the cache folder, for keys and values of conversations that others took
            the place of, so that they go on without their prompts being read again. Default 0, none.
        sequences: Most requests of `Engine.submit` and `Engine.generate_many` that share passes, each with a
            cache of its own; others wait. "auto": as many as memory has room for beside the layers.

    Raises:
        RequestError: A value of another type, or outside its range, or two that exclude each other.
    """

    model: str
    draft: str = "auto"
    draft_bits: DraftBits | None = None
    memory: int | None = None
    vram: int | None = None
    cpu_layers: int | None = None
    experts: Experts = "auto"
    device: str = "auto"
    dtype: Dtype = "bfloat16"
    kv_cache: KVCache = "model"
    budget: int | None = None
    width: int | None = None
    context: int | None = None
    verify: Verify = "coupled"
    tree: Tree = "dynamic"
    temperature: float = 0.0
    learn: bool = True
    converses: bool = False
    quantize: PackFormat | None = None
    corpus: tuple[Path, ...] = ()
    cache_size: int = 0
    sequences: int | Literal["auto"] = 1

    @classmethod
    def of(cls, model: str | Path, settings: Settings) -> "EngineConfig":
        """A configuration from settings as a caller writes them. Raises RequestError."""
        given: dict[str, Any] = dict(settings)
        check_keywords(given, Settings.__annotations__, "setting", {FOR_PARAMS: PARAMS})
        if isinstance(given.get("draft"), list | tuple):
            given["draft"] = ",".join(map(str, given["draft"]))
        for size in ("memory", "vram"):
            if given.get(size) is not None:
                given[size] = parse_bytes(given[size], size)
        if given.get("cache_size") is not None:
            given["cache_size"] = parse_bytes(given["cache_size"], "cache_size", least=0)
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
        read_fields(self)
        drafts = self.drafts
        if self.sequences != AUTO and (not isinstance(self.sequences, int) or self.sequences < 1):
            raise RequestError(f"sequences must be 1 or above, or auto, not {self.sequences!r}")
        if self.budget is not None and self.budget < 1:
            raise RequestError(f"budget must be 1 or above, not {self.budget}: the root is a node too")
        if self.width is not None and self.width < 1:
            raise RequestError(f"width must be 1 or above, not {self.width}")
        if self.memory is not None and self.memory <= 0:
            raise RequestError(f"memory must be above 0, not {self.memory}")
        if self.vram is not None and self.vram <= 0:
            raise RequestError(f"vram must be above 0, not {self.vram}")
        if self.cache_size < 0:
            raise RequestError(f"cache_size must be 0 (none) or above, not {self.cache_size}")
        if self.cpu_layers is not None and self.cpu_layers < 0:
            raise RequestError(f"cpu_layers must be 0 or above, not {self.cpu_layers}")
        if self.experts not in get_args(Experts):
            raise RequestError(f"experts must be 'auto', 'gpu' or 'cpu', not {self.experts!r}")
        if self.experts == "cpu" and self.cpu_layers:
            raise RequestError("the CPU computes layers or experts: leave out `cpu_layers` or `experts`")
        if self.context is not None and self.context < 2:
            raise RequestError(f"context must be 2 or above, not {self.context}")
        if self.verify not in get_args(Verify):
            raise RequestError(f"verify must be 'coupled', 'plain' or 'sequoia', not {self.verify!r}")
        if self.verify == "sequoia":
            if self.tree != "sequoia":
                raise RequestError(
                    '`verify="sequoia"` holds for trees of one shape alone: add `tree="sequoia"`'
                )
            check_draws(drafts)
        if self.tree not in ("dynamic", "sequoia"):
            raise RequestError(f"tree must be 'dynamic' or 'sequoia', not {self.tree!r}")
        if self.dtype not in ("bfloat16", "float32"):
            raise RequestError(f"dtype must be 'bfloat16' or 'float32', not {self.dtype!r}")
        if self.kv_cache not in get_args(KVCache):
            raise RequestError(f"kv_cache must be 'model' or 'int8', not {self.kv_cache!r}")
        if self.draft_bits not in (None, 2, 3, 4, 16):
            raise RequestError(f"draft_bits must be 2, 3, 4 or 16, not {self.draft_bits!r}")
        if self.quantize not in (None, *get_args(PackFormat)):
            formats = ", ".join(get_args(PackFormat))
            raise RequestError(f"quantize must be one of {formats}, not {self.quantize!r}")
        if (AUTO in drafts or SUBSTITUTE in drafts) and self.draft_bits == 16:
            raise RequestError("a substitute has 4, 3 or 2 bits: leave out `draft_bits`, or name a draft")

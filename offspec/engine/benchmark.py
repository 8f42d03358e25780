"""Benchmark of a model on this machine: prompt speed, and generation speed with and without speculation.

The prompts are fixed and sampling is seeded, so two runs with the same weights and arithmetic emit the same
tokens; `setting_differences` compares two runs.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Annotated, Any

import msgspec

from offspec import __version__
from offspec.core.config import NONE, EngineConfig, SamplingParams
from offspec.core.errors import RequestError
from offspec.core.events import Event, Finished, LoadProgress, PassStats, TextDelta
from offspec.engine.engine import Engine, layers_by_tier
from offspec.plan.calibration_prompts import VALIDATION
from offspec.plan.hardware_profile import profile
from offspec_planners.hardware_rates import Hardware
from offspec_planners.units import format_bytes

PROMPTS = VALIDATION[:4]
_TEXT = VALIDATION[6]  # repeated to form the timed prompt
TOKENS, TOKENS_ALONE = 64, 8  # per answer with speculation, and without
_VERSION = 1
_PROMPT_TOKENS = 512  # length of the timed prompt
_STAGE = "Benchmarking"
_SAME = ("model", "format", "KV cache", "temperature")  # settings that affect the tokens
_CLOSE = 0.15  # maximum relative difference of two speeds that count as equal

_Speed = Annotated[float, msgspec.Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation figures without the first pass of each answer, which contains the prompt.

    Args:
        tokens: Number of tokens.
        passes: Passes of the target that emitted the tokens.
        seconds: Wall time of the passes, including drafting.
        bytes_streamed: Bytes of weights copied to GPUs, or read from disk if the CPU computes.
        paused_passes: Passes with drafting paused.
    """

    tokens: int = 0
    passes: int = 0
    seconds: _Speed = 0.0
    bytes_streamed: int = 0
    paused_passes: int = 0

    @property
    def tok_per_s(self) -> float:
        """Tokens per second; 0 if no time was measured."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per pass; 0 without passes."""
        return self.tokens / self.passes if self.passes else 0.0

    def plus(self, stats: PassStats, seconds: float) -> "Generation":
        """Return these figures with one more pass of `seconds` added."""
        return Generation(
            self.tokens + stats.emitted,
            self.passes + 1,
            self.seconds + seconds,
            self.bytes_streamed + stats.bytes_streamed,
            self.paused_passes + stats.paused,
        )


@dataclass(frozen=True, slots=True)
class Prediction:
    """Forecast of the plan: tokens per second and per pass with its draft, and tokens per second without."""

    tok_per_s: _Speed
    tokens_per_pass: _Speed
    tok_per_s_alone: _Speed


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One run of `benchmark`.

    Args:
        version: Version of this JSON layout.
        offspec, torch: Package versions.
        date: Day of the run, ISO 8601.
        machine: Hardware of the machine by name, for display.
        settings: Model, formats and placement by name, for display.
        link: Link that streams the weights, "disk" or "PCIe"; "" if all weights stay in memory.
        link_rate: Measured bandwidth of the link in bytes per second.
        prompt_tokens: Tokens of the timed prompt.
        prompt_seconds: Prefill time of the timed prompt.
        drafted: Generation with speculation.
        alone: Generation without speculation.
        same: Whether both emitted the same tokens, up to the shorter length.
        predicted: Forecast of the plan; None without a plan.
        seed: Sampling seed.
        answers: Token ids of each answer with speculation.
    """

    offspec: str
    torch: str
    date: str
    machine: Mapping[str, str]
    settings: Mapping[str, str]
    link: str
    link_rate: _Speed
    prompt_tokens: int
    prompt_seconds: _Speed
    drafted: Generation
    alone: Generation
    same: bool
    predicted: Prediction | None
    seed: int | None
    answers: tuple[tuple[int, ...], ...]
    version: int = _VERSION

    @property
    def speculates(self) -> bool:
        """Whether a draft source was used."""
        return self.settings.get("draft") != NONE

    @property
    def prompt_tok_per_s(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def speedup(self) -> float:
        """Ratio of tokens per second with speculation to without; 0 if either is unknown."""
        return self.drafted.tok_per_s / self.alone.tok_per_s if self.alone.tokens else 0.0

    @property
    def link_share(self) -> float:
        """Share of `link_rate` used by the passes with speculation."""
        used = self.drafted.bytes_streamed / self.drafted.seconds if self.drafted.seconds else 0.0
        return used / self.link_rate if self.link and self.link_rate else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields and the derived figures as a plain dict."""
        derived = ("prompt_tok_per_s", "speedup", "link_share")
        found = {**asdict(self), **{name: getattr(self, name) for name in derived}}
        for name in ("drafted", "alone"):
            speeds: Generation = getattr(self, name)
            found[name] |= {"tok_per_s": speeds.tok_per_s, "tokens_per_pass": speeds.tokens_per_pass}
        return found

    @classmethod
    def read(cls, text: bytes) -> "Benchmark":
        """Parse the JSON text of `to_json`. Raises RequestError."""
        try:
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise RequestError(
                "not the output of `offspec bench --json`: write the file again with that command"
            ) from None
        if found.version != _VERSION:
            raise RequestError(
                f"benchmark has version {found.version}, this offspec reads version {_VERSION}: run it again"
            )
        return found


def benchmark(
    engine: Engine,
    config: EngineConfig,
    params: SamplingParams,
    seconds: float,
    notify: Callable[[Event], None],
) -> Benchmark:
    """Answer fixed prompts with a loaded engine and measure.

    Args:
        engine: The engine; nothing else may use it meanwhile.
        config: Configuration of the engine.
        params: Sampling parameters, with a seed.
        seconds: Time limit for the answers; answers not started by then are omitted.
        notify: Receives LoadProgress events.

    Raises:
        OffspecError: See `offspec.core.errors`.
    """
    ends = time.monotonic() + seconds
    prompt_tokens, prompt_seconds = _read_prompt(engine)
    drafted, alone, same, answers = Generation(), Generation(), True, list[tuple[int, ...]]()
    for number, prompt in enumerate(PROMPTS):
        notify(LoadProgress(_STAGE, number, len(PROMPTS), "steps"))
        left = ends - time.monotonic()
        if number and left < 0:
            break
        many, few = (replace(params, max_tokens=count, ignore_eos=True) for count in (TOKENS, TOKENS_ALONE))
        drafted, tokens = _answer(engine, prompt, many, drafted, left * 3 / 4, speculate=True)
        alone, expected = _answer(engine, prompt, few, alone, left / 4, speculate=False)
        both = min(len(tokens), len(expected))
        same &= tokens[:both] == expected[:both]
        answers.append(tokens)
    plan = engine.plan
    hardware = plan.hardware if plan is not None else profile(config.device, notify).hardware
    placement = engine.placement
    link = "" if not placement["streamed_layers"] else "disk" if placement["disk_layers"] else "PCIe"
    rate = hardware.link if link == "PCIe" else hardware.disk
    return Benchmark(
        offspec=__version__,
        torch=version("torch"),
        date=datetime.now(UTC).date().isoformat(),
        machine=_machine(hardware),
        settings=_settings(engine, config, params),
        link=link,
        link_rate=0.0 if rate is None or not link else rate.value,
        prompt_tokens=prompt_tokens,
        prompt_seconds=prompt_seconds,
        drafted=drafted,
        alone=alone,
        same=same,
        predicted=None
        if plan is None
        else Prediction(plan.forecast.tok_per_s, plan.forecast.tokens_per_pass, plan.tok_per_s_alone),
        seed=params.seed,
        answers=tuple(answers),
    )


def _read_prompt(engine: Engine) -> tuple[int, float]:
    """Return the length of a long uncached prompt, and the seconds to its first token."""
    ids = engine.encode(_TEXT, raw=True)
    ids = (ids * (_PROMPT_TOKENS // len(ids) + 1))[: min(_PROMPT_TOKENS, engine.context // 2)]
    result = engine.generate(ids, SamplingParams(max_tokens=1, ignore_eos=True), speculate=False)
    return result.prompt_tokens - result.reused_tokens, result.ttft_s


def _answer(
    engine: Engine, prompt: str, params: SamplingParams, previous: Generation, seconds: float, speculate: bool
) -> tuple[Generation, tuple[int, ...]]:
    """Generate an answer; return `previous` plus all its passes but the first, and its token ids.

    Args:
        engine: The engine.
        prompt: The prompt.
        params: Sampling parameters.
        previous: Figures of earlier answers.
        seconds: Time limit, after which the answer is cancelled.
        speculate: Whether to use the draft.
    """
    tokens, began, first = list[int](), time.perf_counter(), True
    ends = began + seconds
    with closing(engine.stream(prompt, params, speculate=speculate)) as events:
        for event in events:
            if isinstance(event, TextDelta):
                tokens += event.token_ids
            elif isinstance(event, PassStats):
                now = time.perf_counter()
                if not first:
                    previous = previous.plus(event, now - began)
                began, first = now, False
                if now > ends:
                    break
            elif isinstance(event, Finished):
                break
    return previous, tuple(tokens)


def _machine(hardware: Hardware) -> dict[str, str]:
    chip, memory = hardware.processor, {"RAM": format_bytes(hardware.ram)}
    if hardware.link is None:
        return {"CPU": chip.name, **memory}
    cpu = {} if hardware.host is None else {"CPU": hardware.host.name}
    return {"GPU": f"{chip.name}, {format_bytes(chip.memory)}", **cpu, **memory}


def _settings(engine: Engine, config: EngineConfig, params: SamplingParams) -> dict[str, str]:
    limits = {"memory": config.memory, "VRAM": config.vram}
    return {
        "model": str(config.model),
        "format": f"{config.quantize or 'as stored'}, computed in {config.dtype}",
        "KV cache": "int8" if config.kv_cache == "int8" else config.dtype,
        "draft": engine.draft,
        "tree": "none"
        if engine.draft == NONE
        else f"up to {engine.budget} nodes, {engine.width} expanded per step",
        "layers": layers_by_tier(engine.placement),
        "limits": ", ".join(f"{name} {format_bytes(size)}" for name, size in limits.items() if size)
        or "none",
        "temperature": f"{params.temperature:g}",
    }


def setting_differences(before: Benchmark, now: Benchmark) -> list[str]:
    """Return the relevant differences between two runs, one per line; empty if they agree.

    Args:
        before: The earlier run.
        now: The later one.
    """
    changed = {
        name: f"{name} is {now.settings.get(name)} (before: {value})"
        for name, value in before.settings.items()
        if now.settings.get(name) != value
    }
    found = [line for name, line in changed.items() if name in _SAME]
    if now.seed != before.seed and now.settings.get("temperature") != "0":
        found.append(f"seed is {now.seed} (before: {before.seed})")
    for number, (earlier, later) in enumerate(zip(before.answers, now.answers, strict=False), 1):
        both = min(len(earlier), len(later))
        if earlier[:both] != later[:both]:
            first = next(index for index in range(both) if earlier[index] != later[index])
            found.append(f"answer {number} differs from token {first + 1} on")
    for name in ("drafted", "alone"):
        speeds: list[float] = [getattr(run, name).tok_per_s for run in (before, now)]
        label = "with speculation" if name == "drafted" else "without speculation"
        if not min(speeds):
            found.append(f"{label}: no speed measured in one of the runs; allow more `seconds`")
        elif abs(speeds[1] / speeds[0] - 1) > _CLOSE:
            found.append(f"{label}: {speeds[1]:.3g} tok/s (before: {speeds[0]:.3g} tok/s)")
    return [*found, *(line for name, line in changed.items() if name not in _SAME)] if found else []

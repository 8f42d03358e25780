"""Events to a terminal: text to stdout; progress, notices and statistics to stderr."""

import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from offspec.core.errors import DiskFullError
from offspec.core.events import (
    Event,
    Finished,
    FinishReason,
    LoadProgress,
    Notice,
    PassStats,
    Prefill,
    Result,
    TextDelta,
)
from offspec.core.sampling_defaults import described
from offspec.ui import interrupt
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import Live, Output, StdoutClosed
from offspec.ui.told import told
from offspec_planners.units import format_bytes, format_seconds

_ENDINGS: dict[FinishReason, str] = {
    "eos": "the model ended its answer",
    "stop": "a stop text came up",
    "length": "--max-tokens is reached",
    "context": "the context is full",
}


class Renderer:
    """Shows one answer, or other work. Every event goes through `show`.

    As a context manager it says that work starts and whether the user interrupted it, and leaves the terminal
    as it was; what was shown stays.
    """

    def __init__(self, *, as_json: bool, quiet: bool, check: bool = False) -> None:
        self._out = Output()
        self._err = Console(stderr=True, highlight=False)
        self._json = as_json
        self._quiet = quiet
        self._check = check
        self._live = Live(self._err, wanted=not quiet and sys.stderr.isatty())
        self._started: float | None = None
        self._tokens = 0
        self._passes = 0
        self.mismatched = False  # whether a check found another token

    def __enter__(self) -> Self:
        self._live.status("starting")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._live.stop()
        with suppress(StdoutClosed, DiskFullError):  # the write that failed has reported it
            self._out.end_line()
        if kind is KeyboardInterrupt:
            after = f" after {_count(self._tokens, 'token')} in {_count(self._passes, 'pass')}"
            self._err.print_line(f"stopped{after if self._passes else ''}")
            interrupt.was_said()

    @property
    def _text_is_seen(self) -> bool:
        """Whether the answer appears on the terminal, where a live line would write over it."""
        return self._out.is_terminal and not self._json

    def show(self, event: Event) -> None:
        """Render one event. Raises StdoutClosed and DiskFullError from writing the text."""
        match event:
            case LoadProgress():
                self._live.progress(event)
            case Notice():
                self._say(told(event))
            case Prefill():
                self._prefill(event)
            case TextDelta():
                self._text(event)
            case PassStats():
                self._pass(event)
            case Finished():
                self._finished(event.result)

    def note(self, text: str) -> None:
        """One line once the answer is over, for good or not."""
        self._live.stop()
        with suppress(StdoutClosed, DiskFullError):
            self._out.end_line()
        self._say(text)

    def _prefill(self, event: Prefill) -> None:
        if self._tokens:  # the answer is complete, and `--check` begins again at the prompt
            self._out.end_line()
            self._live.status("decoding again without speculation, to compare")
            return
        self._started = self._started or time.monotonic()
        reused = f", {event.reused} known" if event.reused else ""
        layers = f"layer {event.layer} of {event.layers}"
        self._live.status(f"reading the prompt: {_count(event.tokens, 'token')}{reused}, {layers}")

    def _text(self, event: TextDelta) -> None:
        self._tokens += len(event.token_ids)
        if self._json or not event.text:
            return
        if self._text_is_seen:
            self._live.stop()
        self._out.write(event.text)

    def _pass(self, event: PassStats) -> None:
        self._passes += 1
        if self._text_is_seen or self._started is None:
            return
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._live.status(
            f"{_count(self._tokens, 'token')} in {_count(self._passes, 'pass')}, "
            f"{self._tokens / seconds:.2f} tok/s"
        )

    def _finished(self, result: Result) -> None:
        self._live.stop()
        if self._json:
            self._out.write(json.dumps(_finite(result.to_json()), ensure_ascii=False, allow_nan=False) + "\n")
        self._out.end_line()
        if not self._quiet:
            for line in statistics(result):
                self._err.print_line(line, style="dim")
        if self._check:
            self.mismatched = bool(result.mismatches)
            for line in check_report(result):
                self._err.print_line(line)

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._err.print_line(text)


def statistics(result: Result) -> list[str]:
    """What an answer cost, in lines for a person."""
    rate = result.bytes_streamed / result.seconds if result.seconds > 0 else 0.0
    device = f", of the GPU {format_bytes(result.peak_device_bytes)}" if result.peak_device_bytes else ""
    beside = f", of which the CPU computed {_count(result.cpu_layers, 'layer')}" if result.cpu_layers else ""
    beside = ", of which the CPU computed the experts" if result.cpu_experts else beside
    # On a CPU all that streams is read from disk.
    from_disk = result.bytes_read not in (0, result.bytes_streamed)
    disk = f", {result.bytes_read / 1e9:.2f} GB read from disk" if from_disk else ""
    sampling = f"{described(result.sampling)}, " if result.sampling else ""
    kept = ", keys and values in int8" if result.kv_cache == "int8" else ""
    return [
        f"{_count(result.tokens, 'token')} in {format_seconds(result.seconds, 2)}: "
        f"{result.tok_per_s:.2f} tok/s, "
        f"first token after {format_seconds(result.ttft_s, 2)}; {_ENDINGS[result.finish_reason]}",
        f"{result.tokens_per_pass:.2f} tokens per pass, {_count(result.passes, 'pass')}; "
        f"{result.bytes_streamed / 1e9:.2f} GB streamed at {rate / 1e9:.2f} GB/s{disk}; "
        f"peak memory {format_bytes(result.peak_memory_bytes)}{device}",
        f"draft {result.draft}, budget {result.budget}, {sampling}seed {result.seed}{kept}; "
        f"{format_seconds(result.draft_seconds, 2)} drafting, "
        f"{format_seconds(result.target_seconds, 2)} in the target{beside}",
        *_paused(result),
        *_guessed(result),
    ]


def _paused(result: Result) -> list[str]:
    """A line on passes without drafting, if there were any."""
    if not result.paused_passes:
        return []
    return [
        f"drafting was paused in {result.paused_passes} of {_count(result.passes, 'pass')}, "
        "since passes without it were faster"
    ]


def _guessed(result: Result) -> list[str]:
    """Accepted tokens of each draft source in a line, where there are several."""
    if len(result.guessed_by) < 2:
        return []
    own = result.tokens - sum(count for _, count in result.guessed_by)
    counts = [f"{Path(name).name} {count}" for name, count in result.guessed_by]
    return [f"draft tokens: {', '.join(counts)}; bonus tokens: {own}"]


def check_report(result: Result) -> list[str]:
    """Where decoding without speculation chose other tokens, one line for each place."""
    if result.mismatches is None:
        return ["check: not made; the answer ended before it"]
    if not result.mismatches:
        return [f"check: same tokens without speculation ({result.tokens} compared)"]
    return [
        f"check: token {place.index} is {_said(place.token)}, without speculation "
        f"{_said(place.unspeculated_token)}; seed {result.seed}, gap {place.gap:.4g} nats"
        for place in result.mismatches
    ]


def _said(token: int | None) -> str:
    return "the end of the answer" if token is None else str(token)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _finite(value: Any) -> Any:
    """The same value with null for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

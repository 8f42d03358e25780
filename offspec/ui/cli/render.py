"""Rendering of events: text to stdout; progress, notices and statistics to stderr."""

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
from offspec.core.sampling_defaults import describe_values
from offspec.ui import interrupt
from offspec.ui.cli.console import Console
from offspec.ui.cli.output import LiveLine, StdoutClosed, StdoutWriter
from offspec.ui.messages import user_message
from offspec_planners.units import format_bytes, format_seconds

_ENDINGS: dict[FinishReason, str] = {
    "eos": "ended by the model",
    "stop": "stopped at a stop text",
    "length": "stopped at --max-tokens",
    "context": "stopped because the context is full",
}


class Renderer:
    """Display of one answer, or of other work. Every event goes through `show`.

    As a context manager it reports that work starts and whether the user interrupted it, and restores the
    terminal; output that was shown stays.
    """

    def __init__(self, *, as_json: bool, quiet: bool, check: bool = False) -> None:
        self._out = StdoutWriter()
        self._err = Console(stderr=True, highlight=False)
        self._json = as_json
        self._quiet = quiet
        self._check = check
        self._live = LiveLine(self._err, wanted=not quiet and sys.stderr.isatty())
        self._started: float | None = None
        self._tokens = 0
        self._passes = 0
        self.mismatched = False  # whether `--check` found a difference

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
            interrupt.mark_reported()

    @property
    def _text_is_seen(self) -> bool:
        """Whether the answer is shown on the terminal, so that a live line would overwrite it."""
        return self._out.is_terminal and not self._json

    def show(self, event: Event) -> None:
        """Render one event. Raises StdoutClosed and DiskFullError from writing the text."""
        match event:
            case LoadProgress():
                self._live.progress(event)
            case Notice():
                self._print_note(user_message(event))
            case Prefill():
                self._prefill(event)
            case TextDelta():
                self._text(event)
            case PassStats():
                self._pass(event)
            case Finished():
                self._finished(event.result)

    def note(self, text: str) -> None:
        """Print a line after the answer, whether it succeeded or failed."""
        self._live.stop()
        with suppress(StdoutClosed, DiskFullError):
            self._out.end_line()
        self._print_note(text)

    def _prefill(self, event: Prefill) -> None:
        if self._tokens:  # the answer is complete, and `--check` restarts at the prompt
            self._out.end_line()
            self._live.status("decoding again without speculation, to compare")
            return
        self._started = self._started or time.monotonic()
        reused = f", {event.reused} cached" if event.reused else ""
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

    def _print_note(self, text: str) -> None:
        if not self._quiet:
            self._err.print_line(text)


def statistics(result: Result) -> list[str]:
    """Format the statistics of an answer as lines of text."""
    device = f", GPU {format_bytes(result.peak_device_bytes)}" if result.peak_device_bytes else ""
    on_cpu = f", {_count(result.cpu_layers, 'layer')} on the CPU" if result.cpu_layers else ""
    on_cpu = ", experts on the CPU" if result.cpu_experts else on_cpu
    sampling = f"{describe_values(result.sampling)}, " if result.sampling else ""
    kept = ", int8 KV cache" if result.kv_cache == "int8" else ""
    return [
        f"{_count(result.tokens, 'token')} in {format_seconds(result.seconds, 2)}: "
        f"{result.tok_per_s:.2f} tok/s, "
        f"first token after {format_seconds(result.ttft_s, 2)}; {_ENDINGS[result.finish_reason]}",
        f"{result.tokens_per_pass:.2f} tokens per pass, {_count(result.passes, 'pass')}; "
        f"{_streamed(result)}peak memory {format_bytes(result.peak_memory_bytes)}{device}",
        f"draft {result.draft}, budget {result.budget}, {sampling}seed {result.seed}{kept}; "
        f"{format_seconds(result.draft_seconds, 2)} drafting, "
        f"{format_seconds(result.target_seconds, 2)} in the target{on_cpu}",
        *_paused(result),
        *_accepted_by_source(result),
    ]


def _streamed(result: Result) -> str:
    """Return a clause about the streamed weights, or "" if all weights stay in memory."""
    # Without a GPU, all streamed bytes are read from disk.
    read = f"{result.bytes_read / 1e9:.2f} GB read from disk"
    if not result.bytes_streamed:
        return f"{read}; " if result.bytes_read else ""
    rate = result.bytes_streamed / result.seconds if result.seconds > 0 else 0.0
    disk = f", {read}" if result.bytes_read not in (0, result.bytes_streamed) else ""
    return f"{result.bytes_streamed / 1e9:.2f} GB streamed at {rate / 1e9:.2f} GB/s{disk}; "


def _paused(result: Result) -> list[str]:
    """Return a line about passes with drafting paused, if there were any."""
    if not result.paused_passes:
        return []
    return [
        f"drafting was paused in {result.paused_passes} of {_count(result.passes, 'pass')}, "
        "because passes without it were faster"
    ]


def _accepted_by_source(result: Result) -> list[str]:
    """Return a line with the accepted tokens of each draft source, if there are several."""
    if len(result.guessed_by) < 2:
        return []
    own = result.tokens - sum(count for _, count in result.guessed_by)
    counts = [f"{Path(name).name} {count}" for name, count in result.guessed_by]
    return [f"draft tokens: {', '.join(counts)}; bonus tokens: {own}"]


def check_report(result: Result) -> list[str]:
    """Format the result of `--check`: one line for each position with a different token."""
    if result.mismatches is None:
        return ["check: not run; the answer ended early"]
    if not result.mismatches:
        return [f"check: same tokens without speculation ({result.tokens} compared)"]
    return [
        f"check: token {place.index} is {_token(place.token)}, without speculation "
        f"{_token(place.unspeculated_token)}; seed {result.seed}, gap {place.gap:.4g} nats"
        for place in result.mismatches
    ]


def _token(token: int | None) -> str:
    return "the end of the answer" if token is None else str(token)


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else plural}"


def _finite(value: Any) -> Any:
    """Replace NaN and infinities, which JSON cannot express, by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

"""Speed statistics of a chat, collected from events."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from offspec.core.events import (
    AcceptedBySource,
    Event,
    Finished,
    PassProgress,
    PassStats,
    Prefill,
    Result,
    total_accepted,
)
from offspec_planners.units import format_rate, format_seconds

HISTORY = 120  # number of the latest passes that are kept
_LONG = 2.0  # seconds of a pass above which its expected duration is shown


class PassTimes(NamedTuple):
    """Seconds of passes: drafting, waiting for weights, and computing layers."""

    draft: float = 0.0
    link: float = 0.0
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over passes.

    accepted_by_source: accepted tokens of each source. paused: passes in which drafting was paused.
    bytes_streamed, bytes_read, experts_requested, experts_read: sums of the fields of `PassStats`.
    """

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    bytes_streamed: int = 0
    times: PassTimes = field(default_factory=PassTimes)
    accepted_by_source: AcceptedBySource = ()
    experts_requested: int = 0
    experts_read: int = 0
    bytes_read: int = 0
    paused: int = 0

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tok_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes_streamed / self.seconds if self.seconds else 0.0

    def add_pass(self, done: PassStats) -> "Totals":
        """Return the totals with another pass."""
        return Totals(
            self.tokens + done.emitted,
            self.passes + 1,
            self.seconds + done.draft_seconds + done.target_seconds,
            self.bytes_streamed + done.bytes_streamed,
            PassTimes(*map(sum, zip(self.times, pass_times(done), strict=True))),
            total_accepted([self.accepted_by_source, done.guessed_by]),
            self.experts_requested + done.experts_asked,
            self.experts_read + done.experts_read,
            self.bytes_read + done.bytes_read,
            self.paused + done.paused,
        )


def pass_times(done: PassStats) -> PassTimes:
    """Return the seconds of each part of a pass."""
    return PassTimes(done.draft_seconds, done.wait_seconds, done.compute_seconds)


class ChatStats:
    """Statistics of a chat, updated by events in the thread that answers and readable from other threads.

    Each attribute is replaced as a whole, so that a reader never sees a partial update.

    Attributes:
        clock: Clock in seconds, for the status line.
        answer: Totals of the running or last answer.
        session: Totals of all answers since the chat began.
        last_times: Seconds of each part of the last pass.
        last_experts: Numbers of experts that the last pass requested and read.
        history: Tokens of each of the latest passes, the oldest first.
        prefill: Prompt of the running or last answer, or None.
        result: Result of the last answer, None while one is running.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.answer = Totals()
        self.session = Totals()
        self.last_times = PassTimes()
        self.last_experts = (0, 0)
        self.history: tuple[int, ...] = ()
        self.prefill: Prefill | None = None
        self.result: Result | None = None
        self._usual = 0.0  # seconds of the last pass
        self._now: tuple[Prefill | PassProgress, float] | None = None  # progress of a pass, and its time

    @property
    def tok_per_s(self) -> float:
        """Tokens per second of the answer, including the time of its prompt."""
        return self.answer.tok_per_s

    @property
    def tokens_per_pass(self) -> float:
        return self.answer.tokens_per_pass

    def on_event(self, event: Event) -> None:
        """Update the statistics from an event."""
        match event:
            case Prefill(layer=0):
                self.answer, self.prefill, self.result = Totals(), event, None
                self._now = event, self.clock()
            case PassProgress():
                self._now = event, self.clock()
            case PassStats():
                self._add_pass(event)
            case Finished():
                self.result, self._now = event.result, None

    def end_answer(self) -> None:
        """Record the end of an answer, successful or not."""
        self._now = None

    def _add_pass(self, done: PassStats) -> None:
        self.answer, self.session = self.answer.add_pass(done), self.session.add_pass(done)
        self.last_times, self.last_experts = pass_times(done), (done.experts_asked, done.experts_read)
        self.history = (*self.history, done.emitted)[-HISTORY:]
        self._usual = done.draft_seconds + done.target_seconds

    def live_line(self) -> str:
        """Return a line about the current activity; empty if idle."""
        now, prefill = self._now, self.prefill
        if now is None or prefill is None:
            return ""
        event, since = now
        waited = max(self.clock() - since, 0.0)
        if isinstance(event, Prefill):
            return " · ".join((_reading(event), _seconds(waited)))
        return " · ".join(self._pass_status(event, prefill, event.seconds + waited))

    def _pass_status(self, at: PassProgress, prefill: Prefill, seconds: float) -> list[str]:
        """Return the parts of a line about a pass: its progress, speed and duration."""
        prompt = [_reading(prefill)] if at.index == 1 else []
        tree = [f"tree of {at.nodes:,}"] if at.nodes and not prompt else []
        if not at.layer:
            waiting = [*tree, "waiting for layer 1"] if at.nodes else ["drafting"]
            return [*prompt, *waiting, _seconds(seconds)]
        parts = [*prompt, f"layer {at.layer:,}/{at.layers:,}"]
        if at.bytes_streamed and at.seconds:
            parts.append(format_rate(at.bytes_streamed / at.seconds))
        parts += tree
        usual = self._usual if at.index > 1 else 0.0
        return [
            *parts,
            f"{_seconds(seconds)} of {_seconds(usual)}"
            if usual >= max(_LONG, seconds)
            else _seconds(seconds),
        ]


def _reading(prefill: Prefill) -> str:
    known = f", {prefill.reused:,} cached" if prefill.reused else ""
    return f"reading the prompt: {prefill.tokens:,} token{'' if prefill.tokens == 1 else 's'}{known}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds, 1)

"""How fast it goes and where the time went, gathered from events as they pass."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from offspec.core.events import (
    Event,
    Finished,
    Guessed,
    PassProgress,
    PassStats,
    Prefill,
    Result,
    total_guessed,
)
from offspec_planners.units import format_rate, format_seconds

HISTORY = 120  # passes that are remembered
_LONG = 2.0  # seconds of a pass from which on the user is told how long it will take


class PassTimes(NamedTuple):
    """Seconds of passes: of the draft, those in which the link was waited for, and those in layers."""

    draft: float = 0.0
    link: float = 0.0
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over passes. guessed: accepted tokens by source. paused: passes in which drafting was paused.

    bytes_streamed, bytes_read, experts_asked, experts_read: as in `PassStats`.
    """

    tokens: int = 0
    passes: int = 0
    seconds: float = 0.0
    bytes_streamed: int = 0
    times: PassTimes = field(default_factory=PassTimes)
    guessed: Guessed = ()
    experts_asked: int = 0
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

    def plus(self, done: PassStats) -> "Totals":
        """With one pass more."""
        return Totals(
            self.tokens + done.emitted,
            self.passes + 1,
            self.seconds + done.draft_seconds + done.target_seconds,
            self.bytes_streamed + done.bytes_streamed,
            PassTimes(*map(sum, zip(self.times, times_of(done), strict=True))),
            total_guessed([self.guessed, done.guessed_by]),
            self.experts_asked + done.experts_asked,
            self.experts_read + done.experts_read,
            self.bytes_read + done.bytes_read,
            self.paused + done.paused,
        )


def times_of(done: PassStats) -> PassTimes:
    """Where the time of a pass went."""
    return PassTimes(done.draft_seconds, done.wait_seconds, done.compute_seconds)


class ChatStats:
    """Hears every event of a chat, from the thread that answers; may be read from another.

    answer: the totals of the answer under way, or of the last one. session: of all answers since the chat
    began. last_times: where the time of the last pass went; last_experts: experts that it asked
    for, and read.
    history: tokens of each of the latest passes, the oldest first. result: of the last answer, None while one
    is under way. clock: seconds, for the line that moves.

    Each of them is replaced as a whole, so that a reader never sees one half done.
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
        self._usual = 0.0  # seconds that the last pass took
        self._now: tuple[Prefill | PassProgress, float] | None = None  # where a pass is, and since when

    @property
    def tok_per_s(self) -> float:
        """Of the answer, the time of its prompt included."""
        return self.answer.tok_per_s

    @property
    def tokens_per_pass(self) -> float:
        return self.answer.tokens_per_pass

    def on_event(self, event: Event) -> None:
        """Take in what an event says."""
        match event:
            case Prefill(layer=0):
                self.answer, self.prefill, self.result = Totals(), event, None
                self._now = event, self.clock()
            case PassProgress():
                self._now = event, self.clock()
            case PassStats():
                self._take(event)
            case Finished():
                self.result, self._now = event.result, None

    def idle(self) -> None:
        """An answer is over, however it ended."""
        self._now = None

    def _take(self, done: PassStats) -> None:
        self.answer, self.session = self.answer.plus(done), self.session.plus(done)
        self.last_times, self.last_experts = times_of(done), (done.experts_asked, done.experts_read)
        self.history = (*self.history, done.emitted)[-HISTORY:]
        self._usual = done.draft_seconds + done.target_seconds

    def live_line(self) -> str:
        """What the machine is doing at this moment; empty where it does nothing."""
        now, prefill = self._now, self.prefill
        if now is None or prefill is None:
            return ""
        event, since = now
        waited = max(self.clock() - since, 0.0)
        if isinstance(event, Prefill):
            return " · ".join((_reading(event), _seconds(waited)))
        return " · ".join(self._doing(event, prefill, event.seconds + waited))

    def _doing(self, at: PassProgress, prefill: Prefill, seconds: float) -> list[str]:
        """The parts of a line on a pass: what it is at, how fast, and how long it takes."""
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
    known = f", {prefill.reused:,} known" if prefill.reused else ""
    return f"reading the prompt: {prefill.tokens:,} token{'' if prefill.tokens == 1 else 's'}{known}"


def _seconds(seconds: float) -> str:
    return format_seconds(seconds, 1)

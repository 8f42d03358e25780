"""Whether passes with drafters are faster than passes without any: seconds a token of both, in this run.

A plan may be wrong: the machine is busy, or the draft guesses worse than was thought. So where passes without
drafters might be as fast, a few are made to know, and drafters rest for as long as they lose. Where nothing
was planned, what is known of such passes comes of those with drafters: each has to wait for its weights as
long, and has fewer rows to compute. Clocks decide how soon tokens come, never which: those do not depend on
trees.
"""

from dataclasses import dataclass, field

_KEPT = 0.8  # of a running mean, from pass to pass
_LEAST = 2  # passes of each kind before they are compared, and of a sample
_MARGIN = 1.05  # by how much faster passes must be without drafters, once many are known
_UNSURE, _UNSURE_AFTER_LOSS = 1.0, 0.5  # added to the margin, divided by the passes with drafters
_HOPED = 2.0  # how much faster than predicted passes without drafters may be
_EVERY = 64  # passes with drafters from one sample of the others to the next
_PROVEN = 8  # passes with drafters after which these have proved their worth
_FIRST_REST, _LONGEST_REST, _LONGER = 32, 2048, 4  # passes; and how many times longer each rest is
# Of one source of several, which may not be worth its time beside the others.
_SOURCE_KEPT = 0.9  # of what was seen, kept from pass to pass
_SOURCE_PASSES = 8  # before a source may be dropped
_NEGLIGIBLE = 0.02  # share of a pass's time for which nothing is dropped
_SOURCE_MARGIN = 1.03  # by how much faster passes must be without it
_SOURCE_FIRST_REST, _SOURCE_LONGEST_REST = 16, 128  # passes
_PROBE = 4  # passes that a source is tried for before it may be dropped again


@dataclass(frozen=True, slots=True)
class OneRow:
    """Between what seconds a pass of one row takes, as far as other passes tell."""

    least: float
    most: float

    @classmethod
    def predicted(cls, seconds: float) -> "OneRow":
        """By a plan, which may be wrong."""
        return cls(seconds / _HOPED, seconds)


@dataclass(slots=True)
class Pace:
    """Running means over passes. least, most: of what one row would have taken in their place."""

    passes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def observe(self, tokens: float, seconds: float, one_row: OneRow) -> None:
        """Count a pass."""
        self.passes += 1
        keep = min(1 - 1 / self.passes, _KEPT)
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.least = keep * self.least + (1 - keep) * one_row.least
        self.most = keep * self.most + (1 - keep) * one_row.most

    @property
    def each(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class Payoff:
    """What passes with drafters and without give, and when drafters rest.

    rest: passes without drafters that are to come: a sample of them, or as many as it seems worth.
    reads: whether those that rested have to read what came meanwhile, so that their next pass takes longer.
    """

    drafted: Pace = field(default_factory=Pace)
    alone: Pace = field(default_factory=Pace)
    rest: int = 0
    reads: bool = True
    _next_rest: int = _FIRST_REST
    _has_lost: bool = False  # whether passes with drafters were slower, and were not found faster since
    _sampled: int = 0  # passes with drafters since passes without were seen
    _catches_up: bool = False

    def sit_out(self) -> None:
        """A pass went by without drafters, which will have more to catch up with."""
        self.rest = max(self.rest - 1, 0)
        self._catches_up = self.reads

    def observe(self, drafted: bool, tokens: float, seconds: float, one_row: OneRow | None) -> None:
        """Count a pass.

        Args:
            drafted: Whether drafters took part.
            tokens: That it gave.
            seconds: That it took in all.
            one_row: What is known of a pass of one row in its place; None: it went by uncounted.
        """
        if one_row is None:
            if not drafted:
                self.sit_out()
            return
        if not drafted:
            self.alone.observe(tokens, seconds, one_row)
            self._sampled = 0
            self.sit_out()
        elif self._catches_up:
            self._catches_up = False
            return
        else:
            self.drafted.observe(tokens, seconds, one_row)
            self._sampled += 1
        known = self.drafted.passes >= (1 if self._has_lost else _LEAST) and not self.rest
        if known and self.drafted.each > self.drafted.least:
            self._decide()

    def _decide(self) -> None:
        """Whether drafters rest, by what is known of both; or a sample is due to know.

        The first come one by one, and the later the more they may lose of the time before them, of which no
        sample takes a larger part than `_LEAST` of `_EVERY`.
        """
        unsure = _UNSURE_AFTER_LOSS if self._has_lost else _UNSURE
        if self.alone.passes < _LEAST:
            self.rest = int(self._sampled * _LEAST >= _EVERY * self._lost)
        elif self._sampled >= _EVERY:
            self.rest = _LEAST
        elif self.drafted.each > (_MARGIN + unsure / self.drafted.passes) * self.alone.each:
            self.rest, self.drafted, self._has_lost = self._next_rest, Pace(), True
            self._next_rest = min(_LONGER * self._next_rest, _LONGEST_REST)
        elif self.drafted.passes >= _PROVEN:
            self._next_rest, self._has_lost = _FIRST_REST, False

    @property
    def _lost(self) -> float:
        """What a pass of one row takes at most beyond its token's worth, as a share of one with drafters."""
        seconds = self.alone.seconds if self.alone.passes else self.drafted.most
        return (seconds - self.drafted.each) / self.drafted.seconds


@dataclass(slots=True)
class Backoff:
    """Running means of one source, over passes: its seconds, and the tokens that no other source proposed.

    rest: passes that it sits out before it is tried again; trial: passes that it has yet to be seen at. The
    first pass after a rest, in which it catches up, does not count.
    """

    seconds: float = 0.0
    gain: float = 0.0
    rest: int = 0
    trial: int = _SOURCE_PASSES
    _next_rest: int = _SOURCE_FIRST_REST
    _catches_up: bool = False

    @property
    def rests(self) -> bool:
        return self.rest > 0

    def sit_out(self) -> None:
        """A pass went by without it."""
        self.rest -= 1
        if self.rest == 0:
            self.trial, self.seconds, self.gain, self._catches_up = _PROBE, 0.0, 0.0, True

    def observe(self, seconds: float, gain: float) -> None:
        """What it took and brought in a pass."""
        if self._catches_up:
            self._catches_up = False
            return
        known = self.seconds > 0 or self.gain > 0
        keep = _SOURCE_KEPT if known else 0.0
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.gain = keep * self.gain + (1 - keep) * gain
        self.trial = max(self.trial - 1, 0)

    def loses(self, tokens: float, seconds: float, link: float) -> bool:
        """Whether passes that yield `tokens` in `seconds` would be faster without it.

        link: seconds that a pass takes at least, with any source.
        """
        if self.trial:
            return False
        without = max(seconds - self.seconds, link)
        saves = seconds - without > _NEGLIGIBLE * seconds
        if saves and (tokens - self.gain) * seconds > _SOURCE_MARGIN * tokens * without:
            return True
        self._next_rest = _SOURCE_FIRST_REST  # it has proved its worth
        return False

    def drop(self) -> None:
        """Let it rest, longer each time."""
        self.rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _SOURCE_LONGEST_REST)

"""Comparison of passes with and without drafters by measured seconds per token.

A plan may be wrong: the machine may be busy, or the draft may be accepted less often than assumed. So if
passes without drafters might be as fast, a few such passes are run as a sample, and drafters are paused while
they are slower. Without a plan, passes without drafters are estimated from those with drafters: they take as
long to stream the weights, and compute fewer rows. Timing decides only how soon tokens come, never which:
tokens do not depend on trees.
"""

from dataclasses import dataclass, field

_KEPT = 0.8  # decay of a running mean, from pass to pass
_LEAST = 2  # passes of each kind before they are compared, and of a sample
_MARGIN = 1.05  # minimum speedup of passes without drafters, once many were measured
_UNSURE, _UNSURE_AFTER_LOSS = 1.0, 0.5  # added to the margin, divided by the passes with drafters
_HOPED = 2.0  # how much faster than predicted passes without drafters may be
_EVERY = 64  # passes with drafters between two samples without
_PROVEN = 8  # passes with drafters after which drafting is considered profitable
_FIRST_REST, _LONGEST_REST, _LONGER = 32, 2048, 4  # passes; and the factor by which each pause is longer
# For one source of several, which may cost more than it adds to the others.
_SOURCE_KEPT = 0.9  # decay of the observations, from pass to pass
_SOURCE_PASSES = 8  # before a source may be paused
_NEGLIGIBLE = 0.02  # share of a pass's time below which a source is never paused
_SOURCE_MARGIN = 1.03  # minimum speedup of passes without the source
_SOURCE_FIRST_REST, _SOURCE_LONGEST_REST = 16, 128  # passes
_PROBE = 4  # passes that a source is tried for before it may be paused again


@dataclass(frozen=True, slots=True)
class OneRowSeconds:
    """Bounds on the seconds of a one-row pass, from measurements of other passes."""

    least: float
    most: float

    @classmethod
    def predicted(cls, seconds: float) -> "OneRowSeconds":
        """Return the bounds given a plan's prediction, which may be wrong."""
        return cls(seconds / _HOPED, seconds)


@dataclass(slots=True)
class PassAverages:
    """Running means over passes. least, most: bounds on the seconds of one-row passes in their place."""

    passes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    least: float = 0.0
    most: float = 0.0

    def observe(self, tokens: float, seconds: float, one_row: OneRowSeconds) -> None:
        """Add a pass."""
        self.passes += 1
        keep = min(1 - 1 / self.passes, _KEPT)
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.least = keep * self.least + (1 - keep) * one_row.least
        self.most = keep * self.most + (1 - keep) * one_row.most

    @property
    def each(self) -> float:
        """Seconds per token."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class Payoff:
    """Yield of passes with and without drafters, and the decision to pause drafters.

    paused_passes: passes without drafters to come: a sample, or as many as seem profitable. needs_catch_up:
    whether paused drafters have to read the tokens generated meanwhile, so that their next pass takes longer.
    """

    with_drafters: PassAverages = field(default_factory=PassAverages)
    alone: PassAverages = field(default_factory=PassAverages)
    paused_passes: int = 0
    needs_catch_up: bool = True
    _next_rest: int = _FIRST_REST
    _has_lost: bool = False  # whether passes with drafters were slower, and were not found faster since
    _sampled: int = 0  # passes with drafters since the last pass without
    _catches_up: bool = False

    def skip_pass(self) -> None:
        """Count a pass without drafters, after which they have more to catch up with."""
        self.paused_passes = max(self.paused_passes - 1, 0)
        self._catches_up = self.needs_catch_up

    def observe(self, drafted: bool, tokens: float, seconds: float, one_row: OneRowSeconds | None) -> None:
        """Count a pass.

        Args:
            drafted: Whether drafters took part.
            tokens: Tokens of the pass.
            seconds: Total seconds of the pass.
            one_row: Bounds on a one-row pass in its place; None: the pass is not counted.
        """
        if one_row is None:
            if not drafted:
                self.skip_pass()
            return
        if not drafted:
            self.alone.observe(tokens, seconds, one_row)
            self._sampled = 0
            self.skip_pass()
        elif self._catches_up:
            self._catches_up = False
            return
        else:
            self.with_drafters.observe(tokens, seconds, one_row)
            self._sampled += 1
        known = self.with_drafters.passes >= (1 if self._has_lost else _LEAST) and not self.paused_passes
        if known and self.with_drafters.each > self.with_drafters.least:
            self._decide()

    def _decide(self) -> None:
        """Pause drafters if passes without them are faster, or schedule a sample if that is uncertain.

        First samples are single passes. The more a sample may cost, the later it is taken, so that samples
        take at most `_LEAST` of `_EVERY` of the time.
        """
        unsure = _UNSURE_AFTER_LOSS if self._has_lost else _UNSURE
        if self.alone.passes < _LEAST:
            self.paused_passes = int(self._sampled * _LEAST >= _EVERY * self._lost)
        elif self._sampled >= _EVERY:
            self.paused_passes = _LEAST
        elif self.with_drafters.each > (_MARGIN + unsure / self.with_drafters.passes) * self.alone.each:
            self.paused_passes, self.with_drafters, self._has_lost = self._next_rest, PassAverages(), True
            self._next_rest = min(_LONGER * self._next_rest, _LONGEST_REST)
        elif self.with_drafters.passes >= _PROVEN:
            self._next_rest, self._has_lost = _FIRST_REST, False

    @property
    def _lost(self) -> float:
        """Upper bound on the loss of a one-row pass compared to one with drafters, as a share of the
        latter.
        """
        seconds = self.alone.seconds if self.alone.passes else self.with_drafters.most
        return (seconds - self.with_drafters.each) / self.with_drafters.seconds


@dataclass(slots=True)
class Backoff:
    """Running means of one source over passes: its seconds, and the tokens that no other source proposed.

    paused_passes: passes to skip before the source is tried again. trial_passes: passes to observe before it
    may be paused. The first pass after a pause, in which the source catches up, does not count.
    """

    seconds: float = 0.0
    gain: float = 0.0
    paused_passes: int = 0
    trial_passes: int = _SOURCE_PASSES
    _next_rest: int = _SOURCE_FIRST_REST
    _catches_up: bool = False

    @property
    def paused(self) -> bool:
        return self.paused_passes > 0

    def skip_pass(self) -> None:
        """Count a pass without this source."""
        self.paused_passes -= 1
        if self.paused_passes == 0:
            self.trial_passes, self.seconds, self.gain, self._catches_up = _PROBE, 0.0, 0.0, True

    def observe(self, seconds: float, gain: float) -> None:
        """Add the seconds and gain of a pass with this source."""
        if self._catches_up:
            self._catches_up = False
            return
        known = self.seconds > 0 or self.gain > 0
        keep = _SOURCE_KEPT if known else 0.0
        self.seconds = keep * self.seconds + (1 - keep) * seconds
        self.gain = keep * self.gain + (1 - keep) * gain
        self.trial_passes = max(self.trial_passes - 1, 0)

    def should_pause(self, tokens: float, seconds: float, link: float) -> bool:
        """Return whether passes that yield `tokens` in `seconds` would be faster without this source.

        link: minimum seconds of a pass, with any source.
        """
        if self.trial_passes:
            return False
        without = max(seconds - self.seconds, link)
        saves = seconds - without > _NEGLIGIBLE * seconds
        if saves and (tokens - self.gain) * seconds > _SOURCE_MARGIN * tokens * without:
            return True
        self._next_rest = _SOURCE_FIRST_REST  # it has paid off
        return False

    def pause(self) -> None:
        """Pause the source, longer each time."""
        self.paused_passes = self._next_rest
        self._next_rest = min(2 * self._next_rest, _SOURCE_LONGEST_REST)

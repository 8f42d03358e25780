"""Whether passes with drafters are faster than passes without any: seconds a token of both, in this run.

A plan may be wrong: the machine is busy, or the draft guesses worse than was thought. So where passes without
drafters might be as fast, a few are made to know, and drafters rest for as long as they lose. Clocks decide
how soon tokens come, never which: those do not depend on trees.
"""

from dataclasses import dataclass, field

_KEPT = 0.8  # of a running mean, from pass to pass
_LEAST = 2  # passes of each kind before they are compared
_MARGIN = 1.05  # by how much faster passes must be without drafters, once many are known
_HOPED = 2.0  # how much faster than predicted passes without drafters may be
_EVERY = 64  # passes with drafters from one sample of the others to the next
_PROVEN = 8  # passes with drafters after which these have proved their worth
_FIRST_REST, _LONGEST_REST, _LONGER = 32, 2048, 4  # passes; and how many times longer each rest is


@dataclass(slots=True)
class Pace:
    """Running means over passes."""

    passes: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Count a pass."""
        self.passes += 1
        keep = min(1 - 1 / self.passes, _KEPT)
        self.tokens = keep * self.tokens + (1 - keep) * tokens
        self.seconds = keep * self.seconds + (1 - keep) * seconds

    @property
    def each(self) -> float:
        """Seconds a token."""
        return self.seconds / self.tokens


@dataclass(slots=True)
class Payoff:
    """What passes with drafters and without give, and when drafters rest.

    rest: passes without drafters that are to come: a sample of them, or as many as it seems worth.
    """

    drafted: Pace = field(default_factory=Pace)
    alone: Pace = field(default_factory=Pace)
    rest: int = 0
    _next_rest: int = _FIRST_REST
    _sampled: int = 0  # passes with drafters since passes without were seen
    _catches_up: bool = False

    def sit_out(self) -> None:
        """A pass went by without drafters, which will have more to catch up with."""
        self.rest = max(self.rest - 1, 0)
        self._catches_up = True

    def observe(self, drafted: bool, tokens: float, seconds: float, predicted: float) -> None:
        """Count a pass.

        Args:
            drafted: Whether drafters took part.
            tokens: That it gave.
            seconds: That it took in all.
            predicted: What a pass of one row was predicted to take.
        """
        if not drafted:
            self.alone.observe(tokens, seconds)
            self._sampled = 0
            self.sit_out()
        elif self._catches_up:
            self._catches_up = False
            return
        else:
            self.drafted.observe(tokens, seconds)
            self._sampled += 1
        known = self.drafted.passes >= _LEAST and not self.rest
        if known and self.drafted.each * _HOPED > predicted:
            self._decide()

    def _decide(self) -> None:
        """Whether drafters rest, by what is known of both; or a sample is due to know."""
        if self.alone.passes < _LEAST or self._sampled >= _EVERY:
            self.rest = _LEAST
        elif self.drafted.each > (_MARGIN + 1 / self.drafted.passes) * self.alone.each:
            self.rest, self.drafted = self._next_rest, Pace()
            self._next_rest = min(_LONGER * self._next_rest, _LONGEST_REST)
        elif self.drafted.passes >= _PROVEN:
            self._next_rest = _FIRST_REST

"""Whether a source of guesses earns the time it takes, and when to try again one that did not."""

from dataclasses import dataclass

_MEMORY = 0.9  # of what was seen, kept from pass to pass
_PASSES = 8  # before a source may be dropped
_NEGLIGIBLE = 0.02  # share of a pass's time for which nothing is dropped
_MARGIN = 1.03  # by how much faster passes must be without it
_FIRST_REST, _LONGEST_REST = 16, 128  # passes
_PROBE = 4  # passes that a source is tried for before it may be dropped again


@dataclass(slots=True)
class Worth:
    """Running means of one source, over passes: its seconds, and the tokens that no other source proposed.

    rest: passes that it sits out before it is tried again; trial: passes that it has yet to be seen at. The
    first pass after a rest, in which it catches up, does not count.
    """

    seconds: float = 0.0
    gain: float = 0.0
    rest: int = 0
    trial: int = _PASSES
    _next_rest: int = _FIRST_REST
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
        keep = _MEMORY if known else 0.0
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
        if saves and (tokens - self.gain) * seconds > _MARGIN * tokens * without:
            return True
        self._next_rest = _FIRST_REST  # it has proved its worth
        return False

    def drop(self) -> None:
        """Let it rest, longer each time."""
        self.rest = self._next_rest
        self._next_rest = min(2 * self._next_rest, _LONGEST_REST)

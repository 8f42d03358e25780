"""What more tokens of a prompt cost, by the passes that were seen."""

import math

_LONG = 64  # rows of a prompt from which a pass tells what they take


class PrefillRate:
    """Seconds that rows of a prompt take beyond those of a pass, which comes in any case."""

    def __init__(self) -> None:
        self._pass = math.inf  # seconds of the shortest pass with few rows
        self._rows, self._seconds = 0, 0.0  # of the latest with many

    def note(self, rows: int, seconds: float) -> None:
        """A prompt of so many rows, or a tree alone, took so long, all its passes together."""
        if rows < _LONG:
            self._pass = min(self._pass, seconds)
        else:
            self._rows, self._seconds = rows, seconds

    def seconds(self, rows: int) -> float | None:
        """What so many rows more would take; None where no long prompt was seen."""
        if not self._rows:
            return None
        alone = self._pass if math.isfinite(self._pass) else 0.0
        return max(self._seconds - alone, 0.0) / self._rows * rows

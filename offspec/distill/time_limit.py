"""The time that a whole distillation may take, divided among text, training and measuring."""

import math
import time
from collections.abc import Callable

from offspec.core.errors import RequestError
from offspec_planners.units import format_seconds

_TEXT = 0.5  # of what is left when the text begins; EAGLE-3 reads the text once more
_TRAINING = 0.85  # of what is left when training begins; the rest is for measuring and writing


class TimeLimit:
    """A deadline that begins with the run.

    Args:
        minutes: Longest time of the run. None: no limit.
        clock: Time in seconds.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.minutes, self._clock = minutes, clock
        self._began = clock()
        self._text_end = math.inf

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.minutes is None else 60 * self.minutes - self.spent

    def begin_text(self) -> None:
        """From now on `text_is_due` counts."""
        self._text_end = self.spent + _TEXT * self.left

    @property
    def text_is_due(self) -> bool:
        """Whether text has had its share."""
        return self.spent >= self._text_end

    def training_minutes(self) -> float | None:
        """Longest time for training from now on; None: no limit. Raises RequestError if none is left."""
        if self.minutes is None:
            return None
        if self.left <= 0:
            began, needed = format_seconds(self.spent), math.ceil(2 * self.spent / 60)
            raise RequestError(
                f"`minutes` {self.minutes:g} is too short: training could begin after {began}; "
                f"give {needed} minutes or more (the text is kept)"
            )
        return _TRAINING * self.left / 60

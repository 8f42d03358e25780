"""A head to be distilled, checked before anything is opened, and the time that the whole run may take."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from offspec.core.errors import RequestError
from offspec_planners.units import format_seconds

Kind = Literal["medusa", "mlp", "eagle3"]
KINDS: tuple[str, ...] = get_args(Kind)

LEAST_TOKENS = 1000
_LEAST_ANSWER = 16
_TEXT = 0.5  # of what is left when the text begins; EAGLE-3 reads the text once more
_TRAINING = 0.85  # of what is left when training begins; the rest is for measuring and writing


@dataclass(frozen=True, slots=True)
class Wanted:
    """A head for a target.

    Args:
        model: What `open_checkpoint` opens.
        kind: "medusa", "mlp" or "eagle3".
        out: The folder to make.
        tokens: Tokens of training text that the target generates.
        length: Most tokens of one answer.
        epochs: Most epochs over the text.
        minutes: Longest time of the whole run: opening the model, text, training and measuring. None: as long
            as the text takes, and eight minutes of training.
        depth: Tokens that the head predicts in a row.
        inner: Width of an MLPSpeculator; None: the target's.

    Raises:
        RequestError: A value outside its range.
    """

    model: str
    kind: Kind
    out: Path
    tokens: int = 200_000
    length: int = 160
    epochs: int = 10
    minutes: float | None = None
    depth: int = 4
    inner: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"the kind of a head is one of {', '.join(KINDS)}, not {self.kind!r}")
        if self.tokens < LEAST_TOKENS:
            raise RequestError(
                f"{self.tokens} tokens are too few to learn from: give `tokens={LEAST_TOKENS}` or more"
            )
        for name, value, least in (
            ("length", self.length, _LEAST_ANSWER),
            ("epochs", self.epochs, 1),
            ("depth", self.depth, 1),
            ("inner", self.inner or 1, 1),
        ):
            if value < least:
                raise RequestError(f"{name} must be {least} or more, not {value}")
        if self.minutes is not None and not self.minutes > 0:
            raise RequestError(f"minutes must be above 0, not {self.minutes}")


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

"""Configuration of a head to be distilled, validated before anything is opened, and its time limit."""

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
_TEXT = 0.5  # share of the remaining time for generating text; EAGLE-3 then reads the text once more
_TRAINING = 0.85  # share of the remaining time for training; the rest is for measuring and writing


@dataclass(frozen=True, slots=True)
class DistillConfig:
    """A head to train for a target.

    Args:
        model: Model name, as in `open_checkpoint`.
        kind: "medusa", "mlp" or "eagle3".
        out: Folder to create.
        tokens: Tokens of training text that the target generates.
        length: Maximum tokens of one answer.
        epochs: Maximum epochs over the text.
        minutes: Maximum time of the whole run: opening the model, text, training and measuring. None: as long
            as the text takes, and eight minutes of training.
        depth: Number of consecutive tokens that the head predicts.
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
            raise RequestError(f"unknown kind of head {self.kind!r}: use one of {', '.join(KINDS)}")
        if self.tokens < LEAST_TOKENS:
            raise RequestError(
                f"{self.tokens} tokens are not enough to train on: give `tokens={LEAST_TOKENS}` or more"
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
    """A deadline that starts with the run.

    Args:
        minutes: Maximum time of the run. None: no limit.
        clock: Returns the time in seconds.
    """

    def __init__(self, minutes: float | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.minutes, self._clock = minutes, clock
        self._began = clock()
        self._text_end = math.inf

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return math.inf if self.minutes is None else 60 * self.minutes - self.spent

    def begin_text(self) -> None:
        """Start the share of time for text, which `text_time_is_up` checks."""
        self._text_end = self.spent + _TEXT * self.left

    @property
    def text_time_is_up(self) -> bool:
        """Whether the time for generating text is used up."""
        return self.spent >= self._text_end

    def training_minutes(self) -> float | None:
        """Return the maximum minutes of training; None: no limit. Raises RequestError if none remain."""
        if self.minutes is None:
            return None
        if self.left <= 0:
            began, needed = format_seconds(self.spent), math.ceil(2 * self.spent / 60)
            raise RequestError(
                f"`minutes` {self.minutes:g} is too short: training could start only after {began}; "
                f"give {needed} minutes or more (the text is kept)"
            )
        return _TRAINING * self.left / 60

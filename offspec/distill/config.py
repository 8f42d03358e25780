"""What is to be distilled, checked before anything is opened."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from offspec.core.errors import RequestError

Kind = Literal["medusa", "mlp", "eagle3"]
KINDS: tuple[str, ...] = get_args(Kind)

LEAST_TOKENS = 1000
_LEAST_ANSWER = 16


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

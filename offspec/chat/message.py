"""One question or answer of a conversation, and how it is read from a file that anyone may have edited."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from offspec.core.config import SamplingParams, is_unicode
from offspec.core.errors import RequestError
from offspec.core.events import FinishReason
from offspec_planners.json_fields import Fields

Role = Literal["user", "assistant"]

_ENDINGS = (*get_args(FinishReason), "failed")
_LARGEST_ID = 2**31 - 1  # tokenizers hold ids in 32 bits


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What an answer took. seconds: wall time; seed: what fixed its tokens, None where nobody was told."""

    tokens: int
    passes: int
    seconds: float
    bytes_streamed: int
    seed: int | None


@dataclass(frozen=True, slots=True)
class Message:
    """One question or answer.

    token_ids: the tokens in which an answer was said, also those that do not show. finish: why it ended, a
    FinishReason or "failed"; None while it comes, or where the process was killed. opened: what the chat
    template had begun the answer with, such as "<think>\\n", which `content` leaves out.
    """

    role: Role
    content: str
    token_ids: tuple[int, ...] | None = None
    finish: str | None = None
    figures: AnswerFigures | None = None
    opened: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object in a session file, without what is not set."""
        values = {
            "role": self.role,
            "content": self.content,
            "token_ids": None if self.token_ids is None else list(self.token_ids),
            "finish": self.finish,
            "figures": None if self.figures is None else asdict(self.figures),
            "opened": self.opened or None,
        }
        return {key: value for key, value in values.items() if value is not None}


def read_message(fields: Fields, role: Role) -> Message:
    """A message from its object in a session file, where it is `role`'s turn. Raises ValueError."""
    given = fields.take("role", json.dumps(role))
    if given != role:
        fields.wrong("role", f"{json.dumps(role)}: questions and answers take turns")
    content = read_text(fields, "content")
    if role == "user":
        fields.done()
        return Message(role, content)
    message = Message(
        role,
        content,
        token_ids=_read_ids(fields) if "token_ids" in fields else None,
        finish=fields.choice("finish", _ENDINGS) if "finish" in fields else None,
        figures=_read_figures(fields.inner("figures")) if "figures" in fields else None,
        opened=read_text(fields, "opened") if "opened" in fields else "",
    )
    fields.done()
    return message


def read_params(fields: Fields) -> SamplingParams:
    """Parameters, each of which may be missing. Raises ValueError."""
    given = {name: read(fields, name) for name, read in _PARAMS.items() if name in fields}
    fields.done()
    try:
        return SamplingParams(**given)
    except RequestError as error:
        raise ValueError(f"params: {error}") from None


def read_text(fields: Fields, key: str) -> str:
    """Text that a tokenizer can take. Raises ValueError."""
    return _checked(fields, key, fields.text(key))


def _checked(fields: Fields, key: str, text: str) -> str:
    return text if is_unicode(text) else fields.wrong(key, "valid Unicode text")


def checked_text(text: str) -> str:
    """Text that somebody typed. Raises RequestError where it is not valid Unicode."""
    if not is_unicode(text):
        raise RequestError("the text is not valid Unicode: it has half of a character in it")
    return text


def _read_ids(fields: Fields) -> tuple[int, ...]:
    should = "a list of token ids, or missing"
    ids = fields.take("token_ids", should)
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i <= _LARGEST_ID for i in ids):
        fields.wrong("token_ids", should)
    return tuple(ids)


def _read_figures(fields: Fields) -> AnswerFigures:
    figures = AnswerFigures(
        tokens=fields.whole("tokens"),
        passes=fields.whole("passes"),
        seconds=fields.number("seconds"),
        bytes_streamed=fields.whole("bytes_streamed"),
        seed=_read_seed(fields, "seed"),
    )
    fields.done()
    return figures


def _read_number(fields: Fields, key: str) -> float:
    """Any finite number: which of them make sense is for SamplingParams to say."""
    value = fields.take(key, "a number")
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else fields.wrong(key, "a number")


def _read_whole(fields: Fields, key: str) -> int:
    """Any whole number; a seed may have 64 bits, which is more than `Fields.whole` takes."""
    value = fields.take(key, "a whole number")
    return value if type(value) is int else fields.wrong(key, "a whole number")


def _read_seed(fields: Fields, key: str) -> int | None:
    return None if fields.take(key, "a whole number or null") is None else _read_whole(fields, key)


def _read_flag(fields: Fields, key: str) -> bool:
    value = fields.take(key, "true or false")
    return value if isinstance(value, bool) else fields.wrong(key, "true or false")


def _read_stop(fields: Fields, key: str) -> tuple[str, ...]:
    return tuple(_checked(fields, key, text) for text in fields.texts(key))


_PARAMS: dict[str, Callable[[Fields, str], Any]] = {
    "temperature": _read_number,
    "top_p": _read_number,
    "top_k": _read_whole,
    "min_p": _read_number,
    "repetition_penalty": _read_number,
    "presence_penalty": _read_number,
    "frequency_penalty": _read_number,
    "seed": _read_seed,
    "max_tokens": _read_whole,
    "stop": _read_stop,
    "ignore_eos": _read_flag,
}

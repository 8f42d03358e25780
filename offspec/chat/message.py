"""Message of a conversation, and its validation when it is read from a file that may have been edited."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from offspec.core.errors import RequestError
from offspec.core.events import FinishReason
from offspec.core.values import is_unicode, short_repr
from offspec_planners.json_fields import Number, Whole, complain, one_of, read

Role = Literal["user", "assistant"]

_ENDINGS = (*get_args(FinishReason), "failed")
_Ids = tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...]  # tokenizers hold ids in 32 bits


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """Cost figures of an answer. seconds: wall time. seed: seed of its tokens, or None if not recorded."""

    tokens: Whole
    passes: Whole
    seconds: Number
    bytes_streamed: Whole
    seed: int | None


@dataclass(frozen=True, slots=True)
class Message:
    """Question or answer.

    token_ids: generated tokens of an answer, including tokens that are not shown. finish: a FinishReason or
    "failed"; None during generation, or if the process was killed. opened: text with which the
    chat template began the answer, such as "<think>\\n"; it is not part of `content`.
    """

    role: Annotated[Role, Meta(description='"user" or "assistant"')]
    content: str
    token_ids: Annotated[_Ids, Meta(description="a list of token ids")] | None = None
    finish: Annotated[str, one_of(*_ENDINGS)] | None = None
    figures: AnswerFigures | None = None
    opened: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the object for a session file, without unset fields."""
        values = asdict(self) | {"opened": self.opened or None}
        return {key: value for key, value in values.items() if value is not None}


def read_message(value: Any, role: Role, path: str) -> Message:
    """Read a message from its object in a session file, which must have this role. Raises ValueError."""
    message = read(value, Message, path, partial=True)
    if message.role != role:
        complain(f"{path}role", message.role, f"{json.dumps(role)}: questions and answers take turns")
    for key, item in value.items():
        if role == "user" and key not in ("role", "content"):
            raise ValueError(f"{path}{key} is not allowed in a question; allowed are content, role")
        if item is None:
            complain(f"{path}{key}", None, "omitted if there is no value")
    return message


def checked_text(text: str) -> str:
    """Return the text. Raises RequestError if it is not a string, or not valid Unicode."""
    if not isinstance(text, str):
        raise RequestError(f"the text must be a string, not {short_repr(text)}")
    if not is_unicode(text):
        raise RequestError("the text is not valid Unicode: it contains half of a character")
    return text

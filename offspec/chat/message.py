"""One question or answer of a conversation, and how it is read from a file that anyone may have edited."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta

from offspec.core.errors import RequestError
from offspec.core.events import FinishReason
from offspec.core.values import is_unicode, shown
from offspec_planners.json_fields import Number, Whole, complain, one_of, read

Role = Literal["user", "assistant"]

_ENDINGS = (*get_args(FinishReason), "failed")
_Ids = tuple[Annotated[int, Meta(ge=0, lt=2**31)], ...]  # tokenizers hold ids in 32 bits


@dataclass(frozen=True, slots=True)
class AnswerFigures:
    """What an answer took. seconds: wall time; seed: what fixed its tokens, None if not recorded."""

    tokens: Whole
    passes: Whole
    seconds: Number
    bytes_streamed: Whole
    seed: int | None


@dataclass(frozen=True, slots=True)
class Message:
    """One question or answer.

    token_ids: the tokens in which an answer was said, also those that do not show. finish: why it ended, a
    FinishReason or "failed"; None while it comes, or where the process was killed. opened: what the chat
    template had begun the answer with, such as "<think>\\n", which `content` leaves out.
    """

    role: Annotated[Role, Meta(description='"user" or "assistant"')]
    content: str
    token_ids: Annotated[_Ids, Meta(description="a list of token ids")] | None = None
    finish: Annotated[str, one_of(*_ENDINGS)] | None = None
    figures: AnswerFigures | None = None
    opened: str = ""

    def to_json(self) -> dict[str, Any]:
        """The object in a session file, without what is not set."""
        values = asdict(self) | {"opened": self.opened or None}
        return {key: value for key, value in values.items() if value is not None}


def read_message(value: Any, role: Role, path: str) -> Message:
    """A message from its object in a session file, where it is `role`'s turn. Raises ValueError."""
    message = read(value, Message, path, partial=True)
    if message.role != role:
        complain(f"{path}role", message.role, f"{json.dumps(role)}: questions and answers take turns")
    for key, item in value.items():
        if role == "user" and key not in ("role", "content"):
            raise ValueError(f"{path}{key} is not known here; known are content, role")
        if item is None:
            complain(f"{path}{key}", None, "left out where there is none")
    return message


def checked_text(text: str) -> str:
    """Text as it was typed. Raises RequestError where it is no string, or not valid Unicode."""
    if not isinstance(text, str):
        raise RequestError(f"the text must be a string, not {shown(text)}")
    if not is_unicode(text):
        raise RequestError("the text is not valid Unicode: it has half of a character in it")
    return text

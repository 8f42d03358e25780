"""Conversation model and its file format.

The file is UTF-8 JSON that users may read and edit: the first line describes the conversation, and each
further line is one message. It begins with "offspec_session", the version of the format. Messages replaced by
a retry or an edit follow as "branches"; a file without branches has version 1.
"""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from offspec.chat.branches import (
    Branch,
    MessageTree,
    branch_lines,
    message_lines,
    read_branches,
    read_messages,
)
from offspec.chat.message import AnswerFigures, Message, checked_text
from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError, SessionError
from offspec.core.files import make_private_folder, real_path, write_atomic
from offspec.core.values import is_unicode
from offspec_planners.json_fields import Whole, check_version, complain, parse, read

__all__ = ["VERSION", "AnswerFigures", "Conversation", "Message", "clean_title", "copy_id", "title_of"]

VERSION = 2

_TITLE = 60  # maximum characters of a title
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_ID = r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}\Z"  # an id becomes a file name, so it cannot contain anything else
_MODE = 0o600  # mode of a session file, which is private


def now() -> str:
    """Return the current UTC time in ISO 8601, with a resolution of seconds."""
    return datetime.now(UTC).strftime(_TIME)


def new_id() -> str:
    """Return a unique conversation id; ids sort by creation time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """Conversation of alternating questions and answers; only the last question may have no answer.

    model: name given by the user. title: first line of the first question, unless the user chose another.
    created, updated: ISO 8601 in UTC. system: system message. branches: messages replaced by retries and
    edits. Raises RequestError if the system message is not valid Unicode.
    """

    model: str
    id: str = field(default_factory=new_id)
    title: str = ""
    created: str = field(default_factory=now)
    updated: str = field(default_factory=now)
    system: str | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    messages: list[Message] = field(default_factory=list)
    branches: tuple[Branch, ...] = ()

    def __post_init__(self) -> None:
        checked_text(self.system or "")
        self.title = self.title or title_of(self.messages)

    @property
    def turns(self) -> int:
        """Number of questions."""
        return sum(message.role == "user" for message in self.messages)

    @property
    def tree(self) -> MessageTree:
        """Messages and branches as a tree."""
        return MessageTree(tuple(self.messages), self.branches)

    def change(self, messages: Iterable[Message], branches: tuple[Branch, ...] = ()) -> None:
        """Replace messages and branches, and a title that was derived from the first question."""
        named = self.title == title_of(self.messages)
        self.messages, self.branches = list(messages), branches
        if named:
            self.title = title_of(self.messages)
        self.updated = now()

    def prompt(self, count: int | None = None) -> list[dict[str, str]]:
        """Return the first `count` messages, by default all, for a chat template, after the system message.

        Empty answers are omitted; a question without an answer is merged with the next question.
        """
        messages = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages[:count]:
            if message.role == "assistant" and not message.content.strip():
                continue
            content = message.opened + message.content
            if message.role == "user" and messages and messages[-1]["role"] == "user":
                messages[-1]["content"] += "\n\n" + content
            else:
                messages.append({"role": message.role, "content": content})
        return messages

    def _about(self) -> dict[str, Any]:
        names = ("id", "title", "model", "created", "updated", "turns", "system")
        about = {name: getattr(self, name) for name in names}
        params = {**asdict(self.params), "stop": list(self.params.stop)}
        return {"offspec_session": VERSION if self.branches else 1, **about, "params": params}

    def to_text(self) -> str:
        """Return the text of a session file. Its first line is sufficient for a list of sessions."""
        about = json.dumps(self._about(), ensure_ascii=False)[:-1]
        text = f'{about}, "messages": [\n{message_lines(self.messages)}\n]'
        if self.branches:
            text += f', "branches": [\n{branch_lines(self.branches, self.messages)}\n]'
        return text + "}\n"

    @classmethod
    def from_json(cls, data: object) -> "Conversation":
        """Return the conversation in the JSON object of a session file.

        Raises SessionError, one line with the key, its value and the expected value.
        """
        try:
            return _read(data)
        except (ValueError, RecursionError) as error:
            raise SessionError(_printable(error)) from error

    @classmethod
    def read(cls, file: Path) -> "Conversation":
        """Read a conversation from a file. Raises SessionError, which names the file and the reason."""
        try:
            return _read(parse(file.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SessionError(_printable(f"cannot read the session {file}: {reason}")) from error
        except (ValueError, RecursionError) as error:
            raise SessionError(_printable(f"{file} is not a valid session file: {error}")) from error

    def write(self, file: Path) -> None:
        """Write the file atomically, readable by its owner only; create the folder if necessary.

        Raises SessionError if the file cannot be written, DiskFullError, and RequestError if the title is not
        valid Unicode.
        """
        checked_text(self.title)
        # A lone surrogate, as in a model's path that is not UTF-8, is written as a JSON escape.
        data = self.to_text().encode("utf-8", "backslashreplace")
        try:
            target = real_path(file)  # a link to a session stays one
            make_private_folder(target.parent)
            write_atomic(target, data, _MODE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SessionError(f"cannot write the session to {file} ({reason}); name another file") from error


def copy_id(name: str, file: Path) -> str:
    """Return the id for a copy of a conversation in a file: always the same for the same id and file."""
    mark = "-" + hashlib.sha256(os.fsencode(real_path(file))).hexdigest()[:8]
    return name if name.endswith(mark) else name[: 64 - len(mark)] + mark


def title_of(messages: Sequence[Message]) -> str:
    """Return a title: the first line of the first question, at most 60 characters; "" without questions."""
    return clean_title(messages[0].content.strip().split("\n")[0]) if messages else ""


def clean_title(text: str) -> str:
    """Return the text as one line of at most 60 characters, without control characters."""
    line = " ".join("".join(" " if _is_control(character) else character for character in text).split())
    return line if len(line) <= _TITLE else line[: _TITLE - 1].rstrip() + "…"


def _is_control(character: str) -> bool:
    return character < " " or "\x7f" <= character < "\xa0"


@dataclass(frozen=True, slots=True)
class _Saved:
    """Contents of a session file, except its version. `turns` is used by lists of sessions only."""

    id: Annotated[str, Meta(pattern=_ID, description="at most 64 letters, digits and hyphens")]
    title: str
    model: str
    created: str
    updated: str
    turns: Whole
    system: str | None
    params: SamplingParams
    messages: list[Message]
    branches: tuple[Branch, ...] = ()


def _read(data: object) -> Conversation:
    """Return the conversation like `Conversation.from_json`, but raise ValueError if the data is invalid."""
    contents = check_version(data, "offspec_session", VERSION, "a session")
    for where, value in _leaves(contents, ""):
        if isinstance(value, str) and where != "model" and not is_unicode(value):
            complain(where, value, "valid Unicode text")
        if isinstance(value, float) and not math.isfinite(value):
            complain(where, value, "a finite number")
    try:
        if "params" in contents:
            contents["params"] = read(contents["params"], SamplingParams, "params.", partial=True)
    except RequestError as error:
        raise ValueError(f"params: {error}") from None
    if isinstance(messages := contents.get("messages"), list):
        contents["messages"] = list(read_messages(messages, "messages"))
        contents["branches"] = read_branches(contents.get("branches", []), contents["messages"])
    saved = read(contents, _Saved)
    for name in ("created", "updated"):
        _check_time(name, getattr(saved, name))
    values = {field.name: getattr(saved, field.name) for field in fields(saved) if field.name != "turns"}
    return Conversation(**values | {"title": clean_title(saved.title)})


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and value of each leaf of a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]")
    else:
        yield path, value


def _check_time(name: str, text: str) -> None:
    try:
        datetime.strptime(text, _TIME)
    except ValueError:
        complain(name, text, 'a time such as "2026-01-31T12:00:00Z"')


def _printable(message: object) -> str:
    """Return a message as one line without control characters or lone surrogates."""
    line = " ".join(str(message).encode("utf-8", "backslashreplace").decode().split())
    return "".join(f"\\x{ord(letter):02x}" if _is_control(letter) else letter for letter in line)

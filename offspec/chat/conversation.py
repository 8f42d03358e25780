"""Who said what, and how it is written to a file.

The file is JSON in UTF-8 that a person may read and edit: its first line says what the conversation is, and
each further line is one message. It begins with "offspec_session", the version of its format. What a retry or
an edit replaced stands behind the messages, as "branches"; a file without any is one of version 1, as before
there were branches.
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
from offspec.core.files import private_folder, real_path, write_file
from offspec.core.values import is_unicode
from offspec_planners.json_fields import Whole, complain, parse, read, without_version

__all__ = ["VERSION", "AnswerFigures", "Conversation", "Message", "clean_title", "copy_id", "headline"]

VERSION = 2

_TITLE = 60  # characters of a first question that name a conversation
_TIME = "%Y-%m-%dT%H:%M:%SZ"
_ID = r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}\Z"  # an id becomes the name of a file, and so is nothing more
_MODE = 0o600  # of a session file, which is private


def now() -> str:
    """The time in UTC, in seconds, as ISO 8601 has it."""
    return datetime.now(UTC).strftime(_TIME)


def new_id() -> str:
    """A name that no other conversation has; names sort by the time when they began."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@dataclass(slots=True, kw_only=True)
class Conversation:
    """What was said so far. Questions and answers take turns; only the last question may lack its answer.

    model: as the user named it. title: the first line of the first question unless the user chose another.
    created, updated: ISO 8601 in UTC. system: what the model is told before everything else. branches: what
    retries and edits replaced. Raises RequestError where the system message is not valid Unicode.
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
        self.title = self.title or headline(self.messages)

    @property
    def turns(self) -> int:
        """Questions asked."""
        return sum(message.role == "user" for message in self.messages)

    @property
    def tree(self) -> MessageTree:
        """The messages, and what branches off them."""
        return MessageTree(tuple(self.messages), self.branches)

    def change(self, messages: Iterable[Message], branches: tuple[Branch, ...] = ()) -> None:
        """Other messages and branches from now on. A title that the first question gave follows them."""
        named = self.title == headline(self.messages)
        self.messages, self.branches = list(messages), branches
        if named:
            self.title = headline(self.messages)
        self.updated = now()

    def prompt(self, count: int | None = None) -> list[dict[str, str]]:
        """The first `count` messages, by default all, as a chat template takes them; the system's in front.

        Answers in which nothing was said are left out, and a question without an answer goes with the next.
        """
        said = [{"role": "system", "content": self.system}] if self.system else []
        for message in self.messages[:count]:
            if message.role == "assistant" and not message.content.strip():
                continue
            content = message.opened + message.content
            if message.role == "user" and said and said[-1]["role"] == "user":
                said[-1]["content"] += "\n\n" + content
            else:
                said.append({"role": message.role, "content": content})
        return said

    def _about(self) -> dict[str, Any]:
        names = ("id", "title", "model", "created", "updated", "turns", "system")
        about = {name: getattr(self, name) for name in names}
        params = {**asdict(self.params), "stop": list(self.params.stop)}
        return {"offspec_session": VERSION if self.branches else 1, **about, "params": params}

    def to_text(self) -> str:
        """A session file. Its first line is all that a list of sessions needs."""
        about = json.dumps(self._about(), ensure_ascii=False)[:-1]
        text = f'{about}, "messages": [\n{message_lines(self.messages)}\n]'
        if self.branches:
            text += f', "branches": [\n{branch_lines(self.branches, self.messages)}\n]'
        return text + "}\n"

    @classmethod
    def from_json(cls, data: object) -> "Conversation":
        """A conversation from the object of a session file.

        Raises SessionError, one line with the key, its value, and what it should be.
        """
        try:
            return _read(data)
        except (ValueError, RecursionError) as error:
            raise SessionError(_printable(error)) from error

    @classmethod
    def read(cls, file: Path) -> "Conversation":
        """The conversation in a file. Raises SessionError, which names the file and what is wrong with it."""
        try:
            return _read(parse(file.read_text("utf-8")))
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SessionError(_printable(f"cannot read the session {file}: {reason}")) from error
        except (ValueError, RecursionError) as error:
            raise SessionError(_printable(f"{file} is not a session that can be used: {error}")) from error

    def write(self, file: Path) -> None:
        """Write the file, whole or not at all, and its folder where there is none yet, for the user alone.

        Raises SessionError where nothing can be written, DiskFullError, RequestError for a title that could
        not be read again.
        """
        checked_text(self.title)
        # What is half of a character, as in a model's path that is not UTF-8, is written as JSON's escape.
        data = self.to_text().encode("utf-8", "backslashreplace")
        try:
            target = real_path(file)  # a link to a session stays one
            private_folder(target.parent)
            write_file(target, data, _MODE)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise SessionError(f"cannot write the session to {file} ({reason}); name another file") from error


def copy_id(name: str, file: Path) -> str:
    """The id of the copy that a conversation of this id has in a file; always the same, so it can be told."""
    mark = "-" + hashlib.sha256(os.fsencode(real_path(file))).hexdigest()[:8]
    return name if name.endswith(mark) else name[: 64 - len(mark)] + mark


def headline(messages: Sequence[Message]) -> str:
    """A title: the first line of the first question, at most 60 characters; "" where nothing was asked."""
    return clean_title(messages[0].content.strip().split("\n")[0]) if messages else ""


def clean_title(text: str) -> str:
    """Text on one line of at most 60 characters, without those that steer a terminal."""
    line = " ".join("".join(" " if _steers(character) else character for character in text).split())
    return line if len(line) <= _TITLE else line[: _TITLE - 1].rstrip() + "…"


def _steers(character: str) -> bool:
    return character < " " or "\x7f" <= character < "\xa0"


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a session file holds besides its version. turns: for lists of sessions, which read no further."""

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
    """What `Conversation.from_json` does, with ValueError for what is wrong."""
    given = without_version(data, "offspec_session", VERSION, "a session")
    for where, value in _leaves(given, ""):
        if isinstance(value, str) and where != "model" and not is_unicode(value):
            complain(where, value, "valid Unicode text")
        if isinstance(value, float) and not math.isfinite(value):
            complain(where, value, "a finite number")
    try:
        if "params" in given:
            given["params"] = read(given["params"], SamplingParams, "params.", partial=True)
    except RequestError as error:
        raise ValueError(f"params: {error}") from None
    if isinstance(messages := given.get("messages"), list):
        given["messages"] = list(read_messages(messages, "messages"))
        given["branches"] = read_branches(given.get("branches", []), given["messages"])
    saved = read(given, _Saved)
    for name in ("created", "updated"):
        _check_time(name, getattr(saved, name))
    values = {field.name: getattr(saved, field.name) for field in fields(saved) if field.name != "turns"}
    return Conversation(**values | {"title": clean_title(saved.title)})


def _leaves(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Everything in a JSON value that holds nothing else, and where it is."""
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
    """A complaint on one line that any terminal can show, whatever it quotes."""
    line = " ".join(str(message).encode("utf-8", "backslashreplace").decode().split())
    return "".join(f"\\x{ord(letter):02x}" if _steers(letter) else letter for letter in line)

"""Conversation tree, which keeps messages replaced by a retry or an edit as branches.

One path from the first question is active, and all other code sees only that path, as `messages`. Replaced
messages form a tuple of branches, each of which may have its own branches. Trees are immutable: every change
creates a new tree, so that a thread that saves never sees a partial change.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Annotated, Any

from msgspec import Meta

from offspec.chat.message import Message, Role, read_message
from offspec.core.errors import RequestError
from offspec_planners.json_fields import Whole, complain, read


@dataclass(frozen=True, slots=True)
class Branch:
    """Inactive version of a turn, with the messages that followed it.

    at: number of messages of the conversation before it. number: its index among the versions of its turn, 0
    for the earliest. messages: its question and all messages that follow. branches: branches of these
    messages.
    """

    at: int
    number: int
    messages: tuple[Message, ...]
    branches: tuple["Branch", ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """Turn with several versions.

    at: index of its question in the messages. active: index of the active version. versions: question and, if
    there is one, answer of each version, the earliest first.
    """

    at: int
    active: int
    versions: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True, slots=True)
class MessageTree:
    """Tree of messages. messages: active path. branches: its branches, ordered by position and number."""

    messages: tuple[Message, ...] = ()
    branches: tuple[Branch, ...] = ()

    def extended(self, *messages: Message) -> "MessageTree":
        """Return a tree with messages added at the end of the active path."""
        return replace(self, messages=(*self.messages, *messages))

    def cut(self, at: int) -> "MessageTree":
        """Return the first `at` messages with their branches, dropping all versions of the following turn."""
        return MessageTree(self.messages[:at], tuple(b for b in self.branches if b.at < at))

    def forked(self, at: int) -> "MessageTree":
        """Return the first `at` messages, with the rest as a branch; the next message is a new version."""
        stays = tuple(b for b in self.branches if b.at <= at)
        goes = tuple(b for b in self.branches if b.at > at)
        left = Branch(at, self._active(at), self.messages[at:], goes)
        return MessageTree(self.messages[:at], _ordered((*stays, left)))

    def switched(self, at: int, number: int) -> "MessageTree":
        """Return a tree in which an inactive version of the turn at `at` is active, with its continuation."""
        tree = self.forked(at)
        chosen = next(b for b in tree.branches if (b.at, b.number) == (at, number))
        rest = (b for b in tree.branches if b is not chosen)
        return MessageTree(tree.messages + chosen.messages, _ordered((*rest, *chosen.branches)))

    def forks(self) -> tuple[Fork, ...]:
        """Return the turns of the active path that have several versions, the earliest first."""
        return tuple(self._fork(at) for at in sorted({branch.at for branch in self.branches}))

    def fork(self, at: int | None) -> Fork:
        """Return the turn whose question is at this index, by default the last with several versions.

        Raises RequestError if there is none.
        """
        forks = [fork for fork in self.forks() if at in (None, fork.at)]
        if not forks:
            raise RequestError("this turn has only one version; a retry or an edit creates another")
        return forks[-1]

    def map(self, change: Callable[[Message], Message]) -> "MessageTree":
        """Return a tree of the same shape with changed messages."""
        return MessageTree(tuple(map(change, self.messages)), _mapped(self.branches, change))

    def _active(self, at: int) -> int:
        """Return the number of the version on the active path: the lowest one that no branch has."""
        taken = {branch.number for branch in self.branches if branch.at == at}
        return next(number for number in count() if number not in taken)

    def _fork(self, at: int) -> Fork:
        active = self._active(at)
        versions = {branch.number: branch.messages[:2] for branch in self.branches if branch.at == at}
        versions[active] = self.messages[at : at + 2]
        return Fork(at, active, tuple(versions[number] for number in sorted(versions)))


def _ordered(branches: Sequence[Branch]) -> tuple[Branch, ...]:
    return tuple(sorted(branches, key=lambda branch: (branch.at, branch.number)))


def _mapped(branches: Sequence[Branch], change: Callable[[Message], Message]) -> tuple[Branch, ...]:
    return tuple(
        replace(b, messages=tuple(map(change, b.messages)), branches=_mapped(b.branches, change))
        for b in branches
    )


def message_lines(messages: Sequence[Message]) -> str:
    """Format messages for a session file, one per line."""
    return ",\n".join(json.dumps(message.to_json(), ensure_ascii=False) for message in messages)


def branch_lines(branches: Sequence[Branch], path: Sequence[Message]) -> str:
    """Format branches for a session file, one message per line. path: messages that they branch off."""
    return ",\n".join(_lines(branch, path) for branch in branches)


def _lines(branch: Branch, path: Sequence[Message]) -> str:
    """Format a branch. A question that equals the path's question, as after a retry, is omitted."""
    messages = branch.messages
    if len(messages) > 1 and messages[0] == path[branch.at]:
        messages = messages[1:]
    text = f'{{"at": {branch.at}, "number": {branch.number}, "messages": [\n{message_lines(messages)}\n]'
    if branch.branches:
        inner = branch_lines(branch.branches, (*path[: branch.at], *branch.messages))
        text += f', "branches": [\n{inner}\n]'
    return text + "}"


@dataclass(frozen=True, slots=True)
class _Saved:
    """Branch in a session file."""

    at: Whole
    number: Whole
    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    branches: list[Any] = field(default_factory=list)


def read_messages(value: Sequence[Any], where: str, first: int = 0) -> Iterator[Message]:
    """Read messages of a session file, in which questions and answers alternate.

    first: 0 if it begins with a question, 1 if with an answer. Raises ValueError.
    """
    for index, message in enumerate(value):
        role: Role = "assistant" if (first + index) % 2 else "user"
        yield read_message(message, role, f"{where}[{index}].")


def read_branches(
    value: object, path: Sequence[Message], where: str = "branches", start: int = 0
) -> tuple[Branch, ...]:
    """Read the branches of a session file. Raises ValueError with the position of an invalid branch.

    Args:
        value: JSON list.
        path: Messages that they branch off, from the first of the conversation.
        where: Position of the list in the file.
        start: Lowest index of a question that they may replace.
    """
    if not isinstance(value, list):
        complain(where, value, "a list")
    branches = [_read(item, path, f"{where}[{index}].", start) for index, item in enumerate(value)]
    places = Counter((branch.at, branch.number) for branch in branches)
    versions = Counter(branch.at for branch in branches)
    for index, branch in enumerate(branches):
        if branch.number > versions[branch.at] or places[branch.at, branch.number] > 1:
            should = f"a number of 0 to {versions[branch.at]} that no other version of the turn has"
            complain(f"{where}[{index}].number", branch.number, should)
    return _ordered(branches)


def _read(value: object, path: Sequence[Message], where: str, start: int) -> Branch:
    saved = read(value, _Saved, where, partial=True)
    at = saved.at
    if at % 2 or not start <= at < len(path):
        complain(f"{where}at", at, f"the index of a question, an even number of {start} to {len(path) - 1}")
    first = saved.messages[0]
    answers = isinstance(first, dict) and first.get("role") == "assistant"  # the question is the path's
    messages = tuple(read_messages(saved.messages, f"{where}messages", 1 if answers else 0))
    messages = (path[at], *messages) if answers else messages
    inner = read_branches(saved.branches, (*path[:at], *messages), f"{where}branches", at + 2)
    return Branch(at, saved.number, messages, inner)

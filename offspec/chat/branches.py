"""A conversation as a tree: what a retry or an edit replaced is kept as a branch beside what is active.

One path from the first question on is active, and all other code sees that path alone, as `messages`. What
left it is a tuple of branches, each of which may have branches of its own. Trees are values: every change
makes another one, so that a thread that saves never meets one half changed.
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
    """A version of a turn that is not active, and what followed it.

    at: how many messages come before it, from the first of the conversation. number: its place among the
    versions of its turn, 0 for the earliest. messages: its question and all that came after. branches: those
    that leave these messages.
    """

    at: int
    number: int
    messages: tuple[Message, ...]
    branches: tuple["Branch", ...] = ()


@dataclass(frozen=True, slots=True)
class Fork:
    """A turn that has several versions.

    at: where its question is in the messages. active: which of the versions that is. versions: the question
    and, where one came, the answer of each, the earliest first.
    """

    at: int
    active: int
    versions: tuple[tuple[Message, ...], ...]


@dataclass(frozen=True, slots=True)
class MessageTree:
    """messages: the active path. branches: what leaves it, ordered by place and number."""

    messages: tuple[Message, ...] = ()
    branches: tuple[Branch, ...] = ()

    def extended(self, *messages: Message) -> "MessageTree":
        """With more messages at the end of the active path."""
        return replace(self, messages=(*self.messages, *messages))

    def cut(self, at: int) -> "MessageTree":
        """The first `at` messages, and what leaves them. The turn behind them goes, with all its versions."""
        return MessageTree(self.messages[:at], tuple(b for b in self.branches if b.at < at))

    def forked(self, at: int) -> "MessageTree":
        """The first `at` messages; what came after is a branch now. What is said next is a new version."""
        stays = tuple(b for b in self.branches if b.at <= at)
        goes = tuple(b for b in self.branches if b.at > at)
        left = Branch(at, self._active(at), self.messages[at:], goes)
        return MessageTree(self.messages[:at], _ordered((*stays, left)))

    def switched(self, at: int, number: int) -> "MessageTree":
        """With a version of the turn at `at` that is not active yet, and with what followed it."""
        tree = self.forked(at)
        chosen = next(b for b in tree.branches if (b.at, b.number) == (at, number))
        rest = (b for b in tree.branches if b is not chosen)
        return MessageTree(tree.messages + chosen.messages, _ordered((*rest, *chosen.branches)))

    def forks(self) -> tuple[Fork, ...]:
        """The turns of the active path that have several versions, the earliest first."""
        return tuple(self._fork(at) for at in sorted({branch.at for branch in self.branches}))

    def fork(self, at: int | None) -> Fork:
        """The turn whose question is at this index, by default the last with several versions.

        Raises RequestError where there is none.
        """
        forks = [fork for fork in self.forks() if at in (None, fork.at)]
        if not forks:
            raise RequestError("there is only one version of this; a retry or an edit makes another")
        return forks[-1]

    def map(self, change: Callable[[Message], Message]) -> "MessageTree":
        """The same tree of other messages."""
        return MessageTree(tuple(map(change, self.messages)), _mapped(self.branches, change))

    def _active(self, at: int) -> int:
        """The number that the version on the active path has: the least that no branch has."""
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
    """Messages in a session file, one a line."""
    return ",\n".join(json.dumps(message.to_json(), ensure_ascii=False) for message in messages)


def branch_lines(branches: Sequence[Branch], path: Sequence[Message]) -> str:
    """Branches in a session file, one message a line. path: the messages that they leave, from the first."""
    return ",\n".join(_lines(branch, path) for branch in branches)


def _lines(branch: Branch, path: Sequence[Message]) -> str:
    """A question that the path has at its place already, as after a retry, is not written again."""
    said = branch.messages
    said = said[1:] if len(said) > 1 and said[0] == path[branch.at] else said
    text = f'{{"at": {branch.at}, "number": {branch.number}, "messages": [\n{message_lines(said)}\n]'
    if branch.branches:
        inner = branch_lines(branch.branches, (*path[: branch.at], *branch.messages))
        text += f', "branches": [\n{inner}\n]'
    return text + "}"


@dataclass(frozen=True, slots=True)
class _Saved:
    """A branch in a session file."""

    at: Whole
    number: Whole
    messages: Annotated[list[Any], Meta(min_length=1, description="a list of at least one message")]
    branches: list[Any] = field(default_factory=list)


def read_messages(value: Sequence[Any], where: str, first: int = 0) -> Iterator[Message]:
    """Messages of a session file, which take turns. first: 0 for a question, 1 for an answer.

    Raises ValueError.
    """
    for index, message in enumerate(value):
        role: Role = "assistant" if (first + index) % 2 else "user"
        yield read_message(message, role, f"{where}[{index}].")


def read_branches(
    value: object, path: Sequence[Message], where: str = "branches", start: int = 0
) -> tuple[Branch, ...]:
    """The branches in a session file. Raises ValueError, which names the one that is wrong by its place.

    Args:
        value: The JSON list.
        path: The messages that they leave, from the first of the conversation.
        where: The list is in the file.
        start: The least index of a question that they may take the place of.
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
    answers = isinstance(first, dict) and first.get("role") == "assistant"  # the path's question, that is
    said = tuple(read_messages(saved.messages, f"{where}messages", 1 if answers else 0))
    said = (path[at], *said) if answers else said
    inner = read_branches(saved.branches, (*path[:at], *said), f"{where}branches", at + 2)
    return Branch(at, saved.number, said, inner)

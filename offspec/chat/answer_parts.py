"""An answer's text, as it comes, in parts: what was thought, what was said, and which tools are called."""

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """More of what was said."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """More of what was thought."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call of a tool. arguments: a JSON object, as text."""

    name: str
    arguments: str


Part = Text | Thinking | Call


class Parts(Protocol):
    """Takes an answer's text apart. shown: special tokens that have to be in that text."""

    shown: frozenset[int]

    def feed(self, text: str) -> list[Part]:
        """The parts that a piece of text completes."""

    def finish(self) -> list[Part]:
        """What is left, now that no text will follow."""


class PlainText(Parts):
    """An answer in which nothing is marked: all of it was said."""

    shown = frozenset[int]()

    def feed(self, text: str) -> list[Part]:
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        return []


class OneCall(Parts):
    """An answer that was made to be a call, after its reasoning: {"name": …, "arguments": {…}}.

    One that was cut short is text. parts: tells reasoning from the call.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts or PlainText()
        self.shown = self._parts.shown
        self._text = ""

    def feed(self, text: str) -> list[Part]:
        return self._taken(self._parts.feed(text))

    def _taken(self, parts: list[Part]) -> list[Part]:
        self._text += "".join(part.text for part in parts if isinstance(part, Text))
        return [part for part in parts if not isinstance(part, Text)]

    def finish(self) -> list[Part]:
        thought = self._taken(self._parts.finish())
        return [*thought, *self._call()]

    def _call(self) -> list[Part]:
        try:
            call = as_call(json.loads(self._text))
        except (ValueError, RecursionError):
            call = None
        return [call or Text(self._text)] if self._text else []


class Trimmed:
    """Text of one kind, without the space before and behind what comes between its pieces."""

    def __init__(self, kind: type[Text] | type[Thinking]) -> None:
        """kind: of its parts."""
        self._kind = kind
        self._space = ""  # may be the last of the piece
        self._fresh = False  # nothing since an interruption

    def add(self, text: str) -> list[Part]:
        """The parts of more text."""
        text = self._space + (text.lstrip() if self._fresh else text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._fresh &= not text
        return [self._kind(shown)] if shown else []

    def interrupt(self) -> None:
        """Something else comes between."""
        self._space, self._fresh = "", True

    def rest(self) -> list[Part]:
        """Space that was held back, now that nothing follows."""
        space, self._space = self._space, ""
        return [self._kind(space)] if space else []


def as_call(value: Any) -> Call | None:
    """A call, from an object that has its name and arguments; None for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if not isinstance(arguments, dict):
        return None
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False))

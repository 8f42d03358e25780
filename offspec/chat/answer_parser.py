"""Streaming parsers that split an answer into reasoning, text and tool calls."""

import json
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class TextPart:
    """Piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """Piece of reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Complete tool call. arguments: a JSON object, as text."""

    name: str
    arguments: str


AnswerPart = TextPart | ReasoningPart | ToolCall


class AnswerParser(Protocol):
    """Parser of an answer's text. shown: special tokens that the text must contain."""

    shown: frozenset[int]

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that a piece of text completes."""

    def finish(self) -> list[AnswerPart]:
        """Return the remaining parts after the last text."""


class PlainTextParser(AnswerParser):
    """Parser of an answer without marks, which is all text."""

    shown = frozenset[int]()

    def feed(self, text: str) -> list[AnswerPart]:
        return [TextPart(text)] if text else []

    def finish(self) -> list[AnswerPart]:
        return []


class SingleCallParser(AnswerParser):
    """Parser of an answer constrained to a call after its reasoning: {"name": …, "arguments": {…}}.

    A truncated call is text. parts: parser that separates reasoning from the call.
    """

    def __init__(self, parts: AnswerParser | None = None) -> None:
        self._parts = parts or PlainTextParser()
        self.shown = self._parts.shown
        self._text = ""

    def feed(self, text: str) -> list[AnswerPart]:
        return self._taken(self._parts.feed(text))

    def _taken(self, parts: list[AnswerPart]) -> list[AnswerPart]:
        self._text += "".join(part.text for part in parts if isinstance(part, TextPart))
        return [part for part in parts if not isinstance(part, TextPart)]

    def finish(self) -> list[AnswerPart]:
        thought = self._taken(self._parts.finish())
        return [*thought, *self._call()]

    def _call(self) -> list[AnswerPart]:
        try:
            call = parse_tool_call(json.loads(self._text))
        except (ValueError, RecursionError):
            call = None
        return [call or TextPart(self._text)] if self._text else []


class WhitespaceTrimmer:
    """Filter that removes whitespace at interruptions of a text. kind: class of the text's parts."""

    def __init__(self, kind: type[TextPart] | type[ReasoningPart]) -> None:
        self._kind = kind
        self._space = ""  # whitespace that may be the end of a piece
        self._fresh = False  # whether no text followed the last interruption

    def add(self, text: str) -> list[AnswerPart]:
        """Add text and return its parts."""
        text = self._space + (text.lstrip() if self._fresh else text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._fresh &= not text
        return [self._kind(shown)] if shown else []

    def interrupt(self) -> None:
        """Note that another kind of part interrupts the text."""
        self._space, self._fresh = "", True

    def flush(self) -> list[AnswerPart]:
        """Return the whitespace that was held back, at the end of the answer."""
        space, self._space = self._space, ""
        return [self._kind(space)] if space else []


def parse_tool_call(value: Any) -> ToolCall | None:
    """Return the call of an object with a name and arguments; None for anything else."""
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
    return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

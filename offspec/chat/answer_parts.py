"""An answer's text, as it comes, in parts: what was thought, what was said, and which tools are called."""

import json
from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Kind = Literal["text", "thought", "call"]


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


class RegionParser(Protocol):
    """A `ResponseParser` of transformers: tells of regions of a text; may raise anything when one ends."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...
    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class AnswerFormat(Protocol):
    """How a model marks the parts of its answers."""

    shown: frozenset[int]  # special tokens that are marks, and must be in the text

    def parser(self, prompt: str, tools: Collection[Mapping[str, Any]]) -> RegionParser:
        """A parser that has read a prompt. Without tools there are no calls."""

    def begun(self, prompt: str) -> str:
        """The end of a prompt that such a parser has read as the beginning of the answer."""

    def kind(self, field: str) -> Kind:
        """Of a field of the parser."""

    def opening(self, field: str, text: str, at: int) -> tuple[int, int]:
        """Where the mark that opened a field begins and ends, at some place of a text or later."""

    def closing(self, field: str, text: str, at: int) -> int:
        """Where the mark at this place of a text, which closed a field, ends."""


class Parts(Protocol):
    """Takes an answer's text apart. shown: special tokens that have to be in that text."""

    shown: frozenset[int]

    def feed(self, text: str) -> list[Part]:
        """The parts that a piece of text completes."""

    def finish(self) -> list[Part]:
        """What is left, now that no text will follow."""


class PlainText:
    """An answer in which nothing is marked: all of it was said."""

    shown = frozenset[int]()

    def feed(self, text: str) -> list[Part]:
        """See `Parts`."""
        return [Text(text)] if text else []

    def finish(self) -> list[Part]:
        """See `Parts`."""
        return []


class OneCall:
    """An answer that was made to be a call, after its reasoning: {"name": …, "arguments": {…}}.

    One that was cut short is text. parts: tells reasoning from the call.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts or PlainText()
        self.shown = self._parts.shown
        self._text = ""

    def feed(self, text: str) -> list[Part]:
        """See `Parts`."""
        return self._taken(self._parts.feed(text))

    def _taken(self, parts: list[Part]) -> list[Part]:
        self._text += "".join(part.text for part in parts if isinstance(part, Text))
        return [part for part in parts if not isinstance(part, Text)]

    def finish(self) -> list[Part]:
        """See `Parts`."""
        thought = self._taken(self._parts.finish())
        return [*thought, *self._call()]

    def _call(self) -> list[Part]:
        try:
            call = as_call(json.loads(self._text))
        except (ValueError, RecursionError):
            call = None
        return [call or Text(self._text)] if self._text else []


class MarkedParts:
    """An answer in a format. A call that is none, or of a tool that is unknown, was said.

    Space around thoughts and calls belongs to their marks, and is no part of the text.
    """

    _parser: RegionParser
    _field: str

    def __init__(
        self, given: AnswerFormat, prompt: str = "", tools: Collection[Mapping[str, Any]] = ()
    ) -> None:
        """
        Args:
            given: How parts are marked.
            prompt: What the model was given, special tokens included: it may begin the answer.
            tools: What may be called, as {"type": "function", "function": {...}}.
        """
        self.shown = given.shown
        self._format, self._tools = given, tools
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._said = _Trimmed(Text)
        self._thought = _Trimmed(Thinking)
        self._begin(prompt)

    def feed(self, text: str) -> list[Part]:
        """See `Parts`."""
        parts = list[Part]()
        while text:
            before = copy(self._parser)
            try:
                events = self._parser.feed(text)
            except Exception:  # a call was not what it should be; the parser raises whatever comes up
                self._parser = before
                text = self._feed_garbled(text, parts)
            else:
                self._hear(text, events, parts)
                text = ""
        return parts

    def finish(self) -> list[Part]:
        """See `Parts`."""
        parts = list[Part]()
        try:
            _, events = self._parser.finalize()
            self._hear("", events, parts)
        except Exception:
            parts += self._said.add(self._text[self._start if self._in_call else self._at :])
        return [*parts, *self._said.rest()]

    def _begin(self, prompt: str) -> None:
        self._parser = self._format.parser(prompt, self._tools)
        self._text = self._format.begun(prompt)  # all that the parser has read
        self._at = 0  # the place in it up to which events have told
        self._start = 0  # of the region, with its mark
        self._in_call = False
        self._hear("", self._parser.initial_events, [])

    def _feed_garbled(self, text: str, parts: list[Part]) -> str:
        """Take a text, up to the end of a region that cannot be read, for said. Returns what is behind it."""
        fed = 0
        while True:
            fed += 1
            try:
                events = self._parser.feed(text[fed - 1])
            except Exception:
                break
            self._hear(text[fed - 1], events, parts)
        whole = self._text + text[fed - 1 :]
        end = max(self._format.closing(self._field, whole, self._at), self._at)
        parts += self._said.add(whole[self._start : end])
        self._begin("")
        return whole[end:]

    def _hear(self, fed: str, events: list[dict[str, Any]], parts: list[Part]) -> None:
        self._text += fed
        for event in events:
            field: str = event["field"]
            kind = self._format.kind(field)
            match event["type"]:
                case "region_open":
                    self._field, self._in_call = field, kind == "call"
                    self._start, self._at = self._format.opening(field, self._text, self._at)
                    if kind == "thought":
                        self._said.interrupt()
                        self._thought.interrupt()
                case "region_chunk":
                    self._at = max(self._text.find(event["text"], self._at), self._at) + len(event["text"])
                    if kind != "call":
                        parts += (self._said if kind == "text" else self._thought).add(event["text"])
                case "region_close":
                    self._at = self._format.closing(field, self._text, self._at)
                    if kind == "call":
                        parts += self._called(event["value"])
                    self._in_call = False

    def _called(self, value: Any) -> list[Part]:
        """The calls of a region, or its text where they are none."""
        if value == "":  # the end of several
            return []
        values = value if isinstance(value, list) else [value]
        calls = [as_call(item.get("function") if isinstance(item, dict) else None) for item in values]
        if not calls or not all(call and call.name in self._names for call in calls):
            return self._said.add(self._text[self._start : self._at])
        self._said.interrupt()
        return [call for call in calls if call]


class _Trimmed:
    """Text of one kind, without the space before and behind what comes between its pieces."""

    def __init__(self, kind: type[Text] | type[Thinking]) -> None:
        self._kind = kind
        self._space = ""  # may be the last of the piece
        self._fresh = False  # nothing since an interruption

    def add(self, text: str) -> list[Part]:
        text = self._space + (text.lstrip() if self._fresh else text)
        shown = text.rstrip()
        self._space = text[len(shown) :]
        self._fresh &= not text
        return [self._kind(shown)] if shown else []

    def interrupt(self) -> None:
        self._space, self._fresh = "", True

    def rest(self) -> list[Part]:
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

"""An answer in its parts by the response template of its tokenizer."""

from collections.abc import Collection, Mapping
from copy import copy
from typing import Any, Literal, Protocol

from offspec.chat.answer_parts import Part, Parts, Text, Thinking, Trimmed, as_call

Kind = Literal["text", "thought", "call"]


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


class MarkedParts(Parts):
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
        self._said = Trimmed(Text)
        self._thought = Trimmed(Thinking)
        self._begin(prompt)

    def feed(self, text: str) -> list[Part]:
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

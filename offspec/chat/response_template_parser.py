"""Answer parser that uses the response template of the tokenizer."""

from collections.abc import Collection, Mapping
from copy import copy
from typing import Any, Literal, Protocol

from offspec.chat.answer_parser import (
    AnswerParser,
    AnswerPart,
    ReasoningPart,
    TextPart,
    WhitespaceTrimmer,
    parse_tool_call,
)

Kind = Literal["text", "thought", "call"]


class ResponseParser(Protocol):
    """transformers' `ResponseParser`: reports regions of a text; may raise anything at a region's end."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...
    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class AnswerFormat(Protocol):
    """Marks of the parts of a model's answers."""

    shown: frozenset[int]  # special tokens that are marks, which the text must contain

    def parser(self, prompt: str, tools: Collection[Mapping[str, Any]]) -> ResponseParser:
        """Return a parser that has read a prompt. Without tools it parses no calls."""

    def answer_prefix(self, prompt: str) -> str:
        """Return the end of a prompt that the parser has read as the beginning of the answer."""

    def kind(self, field: str) -> Kind:
        """Return the kind of a parser field."""

    def opening(self, field: str, text: str, at: int) -> tuple[int, int]:
        """Return the start and end of the mark that opened a field, at or after a position of a text."""

    def closing(self, field: str, text: str, at: int) -> int:
        """Return the end of the mark at a position of a text, which closed a field."""


class ResponseTemplateParser(AnswerParser):
    """Parser of an answer in the model's format. Malformed calls and calls of unknown tools are text.

    Whitespace around reasoning and calls belongs to their marks and is not part of the text.
    """

    _parser: ResponseParser
    _field: str

    def __init__(
        self, format: AnswerFormat, prompt: str = "", tools: Collection[Mapping[str, Any]] = ()
    ) -> None:
        """
        Args:
            format: Format of the answer.
            prompt: Prompt with special tokens, which may already begin the answer.
            tools: Available tools, as {"type": "function", "function": {...}}.
        """
        self.shown = format.shown
        self._format, self._tools = format, tools
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        self._text_trimmer = WhitespaceTrimmer(TextPart)
        self._reasoning_trimmer = WhitespaceTrimmer(ReasoningPart)
        self._begin(prompt)

    def feed(self, text: str) -> list[AnswerPart]:
        parts = list[AnswerPart]()
        while text:
            before = copy(self._parser)
            try:
                events = self._parser.feed(text)
            except Exception:  # malformed call; the parser may raise anything
                self._parser = before
                text = self._feed_garbled(text, parts)
            else:
                self._handle_events(text, events, parts)
                text = ""
        return parts

    def finish(self) -> list[AnswerPart]:
        parts = list[AnswerPart]()
        try:
            _, events = self._parser.finalize()
            self._handle_events("", events, parts)
        except Exception:
            parts += self._text_trimmer.add(self._text[self._start if self._in_call else self._at :])
        return [*parts, *self._text_trimmer.flush()]

    def _begin(self, prompt: str) -> None:
        self._parser = self._format.parser(prompt, self._tools)
        self._text = self._format.answer_prefix(prompt)  # all that the parser has read
        self._at = 0  # end of the text covered by events
        self._start = 0  # start of the region, including its mark
        self._in_call = False
        self._handle_events("", self._parser.initial_events, [])

    def _feed_garbled(self, text: str, parts: list[AnswerPart]) -> str:
        """Treat a text up to the end of an unreadable region as answer text. Return the rest."""
        fed = 0
        while True:
            fed += 1
            try:
                events = self._parser.feed(text[fed - 1])
            except Exception:
                break
            self._handle_events(text[fed - 1], events, parts)
        whole = self._text + text[fed - 1 :]
        end = max(self._format.closing(self._field, whole, self._at), self._at)
        parts += self._text_trimmer.add(whole[self._start : end])
        self._begin("")
        return whole[end:]

    def _handle_events(self, fed: str, events: list[dict[str, Any]], parts: list[AnswerPart]) -> None:
        self._text += fed
        for event in events:
            field: str = event["field"]
            kind = self._format.kind(field)
            match event["type"]:
                case "region_open":
                    self._field, self._in_call = field, kind == "call"
                    self._start, self._at = self._format.opening(field, self._text, self._at)
                    if kind == "thought":
                        self._text_trimmer.interrupt()
                        self._reasoning_trimmer.interrupt()
                case "region_chunk":
                    self._at = max(self._text.find(event["text"], self._at), self._at) + len(event["text"])
                    if kind != "call":
                        parts += (self._text_trimmer if kind == "text" else self._reasoning_trimmer).add(
                            event["text"]
                        )
                case "region_close":
                    self._at = self._format.closing(field, self._text, self._at)
                    if kind == "call":
                        parts += self._called(event["value"])
                    self._in_call = False

    def _called(self, value: Any) -> list[AnswerPart]:
        """Return the calls of a region, or its text if they are invalid."""
        if value == "":  # end of a list of calls
            return []
        values = value if isinstance(value, list) else [value]
        calls = [parse_tool_call(item.get("function") if isinstance(item, dict) else None) for item in values]
        if not calls or not all(call and call.name in self._names for call in calls):
            return self._text_trimmer.add(self._text[self._start : self._at])
        self._text_trimmer.interrupt()
        return [call for call in calls if call]

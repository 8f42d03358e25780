"""Streaming parser for answers in a known chat format."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import regex

from offspec.chat.answer_parser import AnswerParser, AnswerPart, ReasoningPart, TextPart, WhitespaceTrimmer
from offspec.chat.chat_formats import ChatFormat
from offspec.chat.tool_parsers import ParsedCalls, ToolParser, ToolSchemas

_MOST_INVALID = 64  # number of invalid calls after which the rest of a finished answer is text


class _Stage(Enum):
    BEGINNING = auto()  # reasoning may still begin
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class ChatFormatParser(AnswerParser):
    """Parser that splits an answer into reasoning, text and tool calls.

    Invalid calls are text; the text after the opening mark is then parsed as usual. Whitespace around
    reasoning and calls belongs to their marks.
    """

    def __init__(
        self,
        family: ChatFormat | None,
        thought: tuple[str, str] | None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            family: Format of tool calls; None if there are no calls.
            thought: Marks of reasoning; None if there is no reasoning.
            thinking: Whether the prompt begins the reasoning.
            tools: Available tools, as {"type": "function", "function": {...}}.
            shown: Special tokens that the text must contain.
        """
        self.shown = shown
        self._tools = ToolSchemas(tools)
        self._readers = family.readers if family else {}
        self._at_start = family is not None and family.at_start
        self._marks = regex.compile("|".join(map(regex.escape, self._readers)) or r"(?!)")
        self._begins, self._ends = thought or ("", "")
        self._stage = _Stage.THOUGHT if thinking and thought else _Stage.BEGINNING
        self._text = ""  # not yet parsed
        self._open = list[ToolParser]()
        self._mark = ""  # opening mark of the current call
        self._invalid = 0  # number of invalid calls
        self._text_trimmer = WhitespaceTrimmer(TextPart)
        self._reasoning_trimmer = WhitespaceTrimmer(ReasoningPart)
        self._kinds = set[type]()  # kinds of parts so far

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        return self._take(final=False)

    def finish(self) -> list[AnswerPart]:
        return [*self._take(final=True), *self._text_trimmer.flush()]

    def _take(self, final: bool) -> list[AnswerPart]:
        parts = list[AnswerPart]()
        steps = {
            _Stage.BEGINNING: self._take_beginning,
            _Stage.THOUGHT: self._take_reasoning,
            _Stage.TEXT: self._take_text,
            _Stage.CALL: self._take_call,
        }
        while self._text and steps[self._stage](parts, final):
            pass
        return parts

    def _take_beginning(self, parts: list[AnswerPart], final: bool) -> bool:
        """Check for reasoning at the start; return whether this is decided."""
        text = self._text.lstrip()
        if not final and (not text or (self._begins != text and self._begins.startswith(text))):
            return False
        self._stage = _Stage.TEXT
        if self._begins and text.startswith(self._begins):
            self._text = text.removeprefix(self._begins)
            self._think(parts, self._ends)
        return True

    def _think(self, parts: list[AnswerPart], ends: str) -> None:
        self._stage, self._ends = _Stage.THOUGHT, ends
        self._text_trimmer.interrupt()
        self._reasoning_trimmer.interrupt()
        if ReasoningPart in self._kinds:
            parts.append(ReasoningPart("\n\n"))

    def _take_reasoning(self, parts: list[AnswerPart], final: bool) -> bool:
        """Take reasoning; return whether it has ended."""
        before, found, after = self._text.partition(self._ends)
        if not found:
            before, after = _without_beginning(before, (self._ends,), final)
        self._add(parts, self._reasoning_trimmer, before)
        self._text = after
        if found:
            self._text_trimmer.interrupt()
            self._stage = _Stage.TEXT
        return bool(found)

    def _take_text(self, parts: list[AnswerPart], final: bool) -> bool:
        """Take text; return whether a call has begun."""
        found = self._marks.search(self._text)
        late = self._at_start and TextPart in self._kinds
        if found and self._at_start and (late or self._text[: found.start()].strip()):
            found = None
        if found is None:
            marks = () if late else tuple(self._readers)
            before, self._text = _without_beginning(self._text, marks, final)
            self._add(parts, self._text_trimmer, before)
            return False
        self._add(parts, self._text_trimmer, self._text[: found.start()])
        self._text, self._mark = self._text[found.start() :], found[0]
        self._open = [make(self._tools) for make in self._readers[self._mark]]
        self._stage = _Stage.CALL
        return True

    def _take_call(self, parts: list[AnswerPart], final: bool) -> bool:
        """Parse a possible call; return whether it is decided."""
        found: ParsedCalls | bool = False
        while self._open and (found := self._open[0].read(self._text, final)) is False:
            del self._open[0]
        if found is True:
            return False
        self._stage = _Stage.TEXT
        if found is False:
            self._invalid += 1
            if final and self._invalid > _MOST_INVALID:  # each attempt reads the text to its end again
                self._add(parts, self._text_trimmer, self._text)
                self._text = ""
                return False
            self._add(parts, self._text_trimmer, self._mark)
            self._text = self._text[len(self._mark) :]
            return True
        self._text = self._text[found.end :]
        self._text_trimmer.interrupt()
        parts += found.calls
        self._kinds.update(map(type, found.calls))
        if found.reasoning_end:
            self._think(parts, found.reasoning_end)
        elif found.text and TextPart in self._kinds:
            parts.append(TextPart("\n\n"))
        return True

    def _add(self, parts: list[AnswerPart], kind: WhitespaceTrimmer, text: str) -> None:
        added = kind.add(text)
        self._kinds.update(map(type, added))
        parts += added


def _without_beginning(text: str, marks: Sequence[str], final: bool) -> tuple[str, str]:
    """Split a text before its end if that may be the beginning of a mark. final: no more text follows."""
    if final:
        return text, ""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return text[: len(text) - longest], text[len(text) - longest :]

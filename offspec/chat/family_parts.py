"""An answer of a known family in its parts, as its text comes."""

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

import regex

from offspec.chat.answer_parts import Part, Parts, Text, Thinking, Trimmed
from offspec.chat.call_readers import Read, Reader, Tools
from offspec.chat.families import Family

_MOST_REFUSED = 64


class _Stage(Enum):
    BEGINNING = auto()  # reasoning may still begin
    THOUGHT = auto()
    TEXT = auto()
    CALL = auto()


class FamilyParts(Parts):
    """Takes the text of an answer apart.

    What opens like a call and is not a valid one is text; what follows its mark is read as ever. Space around
    reasoning and calls belongs to their marks.
    """

    def __init__(
        self,
        family: Family | None,
        thought: tuple[str, str] | None,
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        """
        Args:
            family: How calls are marked. None: there are none.
            thought: The marks of reasoning. None: there is none.
            thinking: The prompt begins the reasoning.
            tools: What may be called, as {"type": "function", "function": {...}}.
            shown: Special tokens that the text has to have.
        """
        self.shown = shown
        self._tools = Tools(tools)
        self._readers = family.readers if family else {}
        self._at_start = family is not None and family.at_start
        self._marks = regex.compile("|".join(map(regex.escape, self._readers)) or r"(?!)")
        self._begins, self._ends = thought or ("", "")
        self._stage = _Stage.THOUGHT if thinking and thought else _Stage.BEGINNING
        self._text = ""  # that is not taken apart yet
        self._open = list[Reader]()
        self._mark = ""  # of the call that is open
        self._refused = 0  # calls that were none
        self._said, self._thinking = Trimmed(Text), Trimmed(Thinking)
        self._any = set[type]()  # kinds of parts so far

    def feed(self, text: str) -> list[Part]:
        self._text += text
        return self._take(final=False)

    def finish(self) -> list[Part]:
        return [*self._take(final=True), *self._said.rest()]

    def _take(self, final: bool) -> list[Part]:
        parts = list[Part]()
        steps = {
            _Stage.BEGINNING: self._take_beginning,
            _Stage.THOUGHT: self._take_thought,
            _Stage.TEXT: self._take_text,
            _Stage.CALL: self._take_call,
        }
        while self._text and steps[self._stage](parts, final):
            pass
        return parts

    def _take_beginning(self, parts: list[Part], final: bool) -> bool:
        """Whether it is known if reasoning begins the answer."""
        text = self._text.lstrip()
        if not final and (not text or (self._begins != text and self._begins.startswith(text))):
            return False
        self._stage = _Stage.TEXT
        if self._begins and text.startswith(self._begins):
            self._text = text.removeprefix(self._begins)
            self._think(parts, self._ends)
        return True

    def _think(self, parts: list[Part], ends: str) -> None:
        self._stage, self._ends = _Stage.THOUGHT, ends
        self._said.interrupt()
        self._thinking.interrupt()
        if Thinking in self._any:
            parts.append(Thinking("\n\n"))

    def _take_thought(self, parts: list[Part], final: bool) -> bool:
        """Whether the reasoning has ended."""
        before, found, after = self._text.partition(self._ends)
        if not found:
            before, after = _without_beginning(before, (self._ends,), final)
        self._add(parts, self._thinking, before)
        self._text = after
        if found:
            self._said.interrupt()
            self._stage = _Stage.TEXT
        return bool(found)

    def _take_text(self, parts: list[Part], final: bool) -> bool:
        """Whether a call has begun."""
        found = self._marks.search(self._text)
        late = self._at_start and Text in self._any
        if found and self._at_start and (late or self._text[: found.start()].strip()):
            found = None
        if found is None:
            marks = () if late else tuple(self._readers)
            before, self._text = _without_beginning(self._text, marks, final)
            self._add(parts, self._said, before)
            return False
        self._add(parts, self._said, self._text[: found.start()])
        self._text, self._mark = self._text[found.start() :], found[0]
        self._open = [make(self._tools) for make in self._readers[self._mark]]
        self._stage = _Stage.CALL
        return True

    def _take_call(self, parts: list[Part], final: bool) -> bool:
        """Whether it is known if this is a call."""
        found: Read | bool = False
        while self._open and (found := self._open[0].read(self._text, final)) is False:
            del self._open[0]
        if found is True:
            return False
        self._stage = _Stage.TEXT
        if found is False:
            self._refused += 1
            if final and self._refused > _MOST_REFUSED:  # each would be read to the end again
                self._add(parts, self._said, self._text)
                self._text = ""
                return False
            self._add(parts, self._said, self._mark)
            self._text = self._text[len(self._mark) :]
            return True
        self._text = self._text[found.end :]
        self._said.interrupt()
        parts += found.calls
        self._any.update(map(type, found.calls))
        if found.thought:
            self._think(parts, found.thought)
        elif found.text and Text in self._any:
            parts.append(Text("\n\n"))
        return True

    def _add(self, parts: list[Part], kind: Trimmed, text: str) -> None:
        added = kind.add(text)
        self._any.update(map(type, added))
        parts += added


def _without_beginning(text: str, marks: Sequence[str], final: bool) -> tuple[str, str]:
    """A text without its end that may begin a mark, and that end."""
    if final:
        return text, ""
    longest = 0
    for mark in marks:
        for length in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:length]):
                longest = length
                break
    return text[: len(text) - longest], text[len(text) - longest :]

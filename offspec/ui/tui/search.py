"""Search in the conversation: all places of some words, of which one is selected and scrolled to."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from textual.geometry import Offset
from textual.selection import Selection
from textual.widget import Widget
from textual.widgets import Static

from offspec.ui.chat.thinking import without_thinking
from offspec.ui.tui.answer import Answer, AnswerState
from offspec.ui.tui.markdown import StreamedMarkdown, plain_text
from offspec.ui.tui.transcript_entries import Entry, Question
from offspec.ui.tui.transcript_view import TranscriptView


class Place(NamedTuple):
    """One match in an entry, and how many are before it there."""

    entry: Entry
    before: int


class Search:
    """Goes through the places of words in questions and answers, whatever their case and line breaks."""

    def __init__(self, transcript: TranscriptView) -> None:
        self._transcript = transcript
        self._texts: dict[int, tuple[str, str]] = {}  # by entry: its source, and what is shown of it
        self._at: Place | None = None

    async def seek(self, words: str, by: int) -> str:
        """Show the latest place (by = 0), or the next one above (-1) or below (1); return which it is."""
        pattern = _pattern(words)
        places = [] if pattern is None else list(self._places(pattern))
        if pattern is None or not places:
            self.end()
            return "nothing found" if pattern else ""
        index = len(places) - 1
        if by and self._at in places:
            index = (places.index(self._at) + by) % len(places)
        self._at = places[index]
        await self._transcript.reveal(self._at.entry)
        self._transcript.call_after_refresh(self._show, self._at, pattern)
        return f"{index + 1:,} of {len(places):,}"

    def end(self) -> None:
        """Nothing is selected any more; what is in view stays."""
        self._at = None
        self._transcript.screen.clear_selection()

    def _places(self, pattern: re.Pattern[str]) -> Iterator[Place]:
        for entry in self._transcript.entries:
            if entry.kind is None:
                matches = pattern.finditer(self._text(entry))
                yield from (Place(entry, before) for before, _ in enumerate(matches))

    def _text(self, entry: Entry) -> str:
        source, shown = self._texts.get(id(entry), ("", ""))
        if source != entry.text:
            said = entry.content
            shown = entry.text
            if isinstance(said, AnswerState):
                shown = plain_text(without_thinking(said.text, said.opened))
            self._texts[id(entry)] = entry.text, shown
        return shown

    def _show(self, place: Place, pattern: re.Pattern[str]) -> None:
        """Select the match in the widget that has it, and scroll there."""
        widget = place.entry.widget
        if widget is None or place != self._at:
            return
        if isinstance(widget, Question) and widget.folded and not _matches(_text_of(widget), pattern):
            widget.toggle()
            self._transcript.call_after_refresh(self._show, place, pattern)
            return
        found = [
            (leaf, n) for leaf in _leaves(widget) for n, _ in enumerate(_matches(_text_of(leaf), pattern))
        ]
        if not found:  # it goes over the edge of a cell, or of a quotation
            self._transcript.screen.clear_selection()
            self._transcript.show_row(widget, 0)
            return
        leaf, index = found[min(place.before, len(found) - 1)]
        self._transcript.screen.selections = {leaf: _matches(_text_of(leaf), pattern)[index]}
        rows = _matches(_rows_of(leaf), pattern)
        start = rows[min(index, len(rows) - 1)].start if rows else None
        self._transcript.show_row(leaf, start.y if start else 0)


def _pattern(words: str) -> re.Pattern[str] | None:
    """A pattern of these words with any white space between them; None if there are none."""
    parts = [re.escape(word) for word in words.split()]
    return re.compile(r"\s+".join(parts), re.IGNORECASE) if parts else None


def _leaves(widget: Widget) -> Sequence[Widget]:
    """The widgets that show the text of a question or an answer, in their order."""
    if not isinstance(widget, Answer):
        return [widget]
    return [leaf for leaf in widget.children if leaf.display and _shows_text(leaf)]


def _shows_text(leaf: Widget) -> bool:
    return isinstance(leaf, StreamedMarkdown) or leaf.has_class("tokens")


def _text_of(leaf: Widget) -> str:
    """The text of a widget, in whose lines selections count."""
    return str(leaf.visual) if isinstance(leaf, Static) else _rows_of(leaf)


def _rows_of(leaf: Widget) -> str:
    """The text of a widget as it is wrapped."""
    return "\n".join(leaf.render_line(y).text for y in range(leaf.size.height))


def _matches(text: str, pattern: re.Pattern[str]) -> list[Selection]:
    return [
        Selection(_offset(text, match.start()), _offset(text, match.end()))
        for match in pattern.finditer(text)
    ]


def _offset(text: str, at: int) -> Offset:
    return Offset(at - text.rfind("\n", 0, at) - 1, text.count("\n", 0, at))

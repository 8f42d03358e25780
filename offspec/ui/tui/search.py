"""Search in the conversation: all places of some words, of which one is selected and scrolled to."""

import re
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.geometry import Offset
from textual.selection import Selection
from textual.widget import Widget
from textual.widgets import Input, Static

from offspec.ui.chat.thinking import without_thinking
from offspec.ui.tui.answer import Answer, AnswerState
from offspec.ui.tui.markdown import StreamedMarkdown, plain_text
from offspec.ui.tui.transcript_entries import Entry, Question
from offspec.ui.tui.transcript_view import TranscriptView


class Place(NamedTuple):
    """One match in an entry, and how many are before it there."""

    entry: Entry
    before: int


class SearchBar(Horizontal):
    """Goes through the places of words in questions and answers, whatever their case and line breaks.

    Args:
        transcript: The conversation.
        composer: Takes the keys back when the search is over.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("enter,up", "step(-1)", show=False, priority=True),
        Binding("shift+enter,down", "step(1)", show=False),
        Binding("pageup", "app.page(-1)", show=False),
        Binding("pagedown", "app.page(1)", show=False),
    ]

    def __init__(self, transcript: TranscriptView, composer: Widget) -> None:
        super().__init__(id="search")
        self.display = False
        self._transcript, self._composer = transcript, composer
        self._texts: dict[int, tuple[str, str]] = {}  # by entry: its source, and what is shown of it
        self._at: Place | None = None

    def compose(self) -> ComposeResult:
        yield Static("Find ", markup=False)
        yield Input(placeholder="words · ↑ ↓ go through the places · esc closes", compact=True)
        yield Static("", id="search-place", markup=False)

    def open(self) -> None:
        """Take the keys; what was sought last is there again."""
        self.display = True
        self.query_one(Input).focus()
        self.action_step(0)

    def action_step(self, by: int) -> None:
        """Go to the latest place (0), or the next one above (-1) or below (1), one step after the other."""
        self.app.call_later(self._step, self.query_one(Input).value, by)

    def action_close(self) -> None:
        self.display = False
        self.app.call_later(self._unselect)
        self._composer.focus()

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.action_step(0)

    async def _step(self, words: str, by: int) -> None:
        place = await self._seek(words, by)
        self.query_one("#search-place", Static).update(Content(place))

    async def _seek(self, words: str, by: int) -> str:
        """Show a place; return which it is, such as "2 of 7"."""
        pattern = _pattern(words)
        places = [] if pattern is None else list(self._places(pattern))
        if pattern is None or not places:
            self._unselect()
            return "nothing found" if pattern else ""
        index = len(places) - 1
        if by and self._at in places:
            index = (places.index(self._at) + by) % len(places)
        self._at = places[index]
        await self._transcript.reveal(self._at.entry)
        self._transcript.call_after_refresh(self._show, self._at, pattern)
        return f"{index + 1:,} of {len(places):,}"

    def _unselect(self) -> None:
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
    shown = (leaf for leaf in widget.children if leaf.display)
    return [leaf for leaf in shown if isinstance(leaf, StreamedMarkdown) or leaf.has_class("tokens")]


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

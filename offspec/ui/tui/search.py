"""Search in the conversation: all matches of some words, one of which is selected and scrolled to."""

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

from offspec.ui.chat.reasoning import without_reasoning
from offspec.ui.tui.answer import Answer, AnswerState
from offspec.ui.tui.markdown import StreamedMarkdown, plain_text
from offspec.ui.tui.transcript_entries import Entry, Question
from offspec.ui.tui.transcript_view import TranscriptView


class SearchMatch(NamedTuple):
    """A match in an entry. before: number of earlier matches in the same entry."""

    entry: Entry
    before: int


class SearchBar(Horizontal):
    """Search bar for words in questions and answers, ignoring case and line breaks.

    Args:
        transcript: View of the conversation.
        composer: Widget that gets the focus when the search is closed.
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
        self._texts: dict[int, tuple[str, str]] = {}  # by entry: its source and the displayed text
        self._at: SearchMatch | None = None

    def compose(self) -> ComposeResult:
        yield Static("Find ", markup=False)
        yield Input(placeholder="words · ↑ ↓ step through matches · esc closes", compact=True)
        yield Static("", id="search-place", markup=False)

    def open(self) -> None:
        """Take the focus and repeat the last search."""
        self.display = True
        self.query_one(Input).focus()
        self.action_step(0)

    def action_step(self, by: int) -> None:
        """Go to the latest match (0), or to the next one above (-1) or below (1)."""
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
        """Show a match and return its position, such as "2 of 7"."""
        pattern = _pattern(words)
        places = [] if pattern is None else list(self._find_matches(pattern))
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
        """Clear the selection without scrolling."""
        self._at = None
        self._transcript.screen.clear_selection()

    def _find_matches(self, pattern: re.Pattern[str]) -> Iterator[SearchMatch]:
        for entry in self._transcript.entries:
            if entry.kind is None:
                matches = pattern.finditer(self._text(entry))
                yield from (SearchMatch(entry, before) for before, _ in enumerate(matches))

    def _text(self, entry: Entry) -> str:
        source, shown = self._texts.get(id(entry), ("", ""))
        if source != entry.text:
            content = entry.content
            shown = entry.text
            if isinstance(content, AnswerState):
                shown = plain_text(without_reasoning(content.text, content.template_prefix))
            self._texts[id(entry)] = entry.text, shown
        return shown

    def _show(self, place: SearchMatch, pattern: re.Pattern[str]) -> None:
        """Select the match in its widget, and scroll to it."""
        widget = place.entry.widget
        if widget is None or place != self._at:
            return
        if isinstance(widget, Question) and widget.folded and not _matches(_text_of(widget), pattern):
            widget.toggle()
            self._transcript.call_after_refresh(self._show, place, pattern)
            return
        found = [
            (leaf, n)
            for leaf in _text_widgets(widget)
            for n, _ in enumerate(_matches(_text_of(leaf), pattern))
        ]
        if not found:  # the match crosses the edge of a table cell or a quotation
            self._transcript.screen.clear_selection()
            self._transcript.show_row(widget, 0)
            return
        leaf, index = found[min(place.before, len(found) - 1)]
        self._transcript.screen.selections = {leaf: _matches(_text_of(leaf), pattern)[index]}
        rows = _matches(_rows_of(leaf), pattern)
        start = rows[min(index, len(rows) - 1)].start if rows else None
        self._transcript.show_row(leaf, start.y if start else 0)


def _pattern(words: str) -> re.Pattern[str] | None:
    """Return a pattern of these words with any white space between them; None without words."""
    parts = [re.escape(word) for word in words.split()]
    return re.compile(r"\s+".join(parts), re.IGNORECASE) if parts else None


def _text_widgets(widget: Widget) -> Sequence[Widget]:
    """Return the widgets with the text of a question or an answer, in order."""
    if not isinstance(widget, Answer):
        return [widget]
    shown = (leaf for leaf in widget.children if leaf.display)
    return [leaf for leaf in shown if isinstance(leaf, StreamedMarkdown) or leaf.has_class("tokens")]


def _text_of(leaf: Widget) -> str:
    """Return the text of a widget, whose lines selections refer to."""
    return str(leaf.visual) if isinstance(leaf, Static) else _rows_of(leaf)


def _rows_of(leaf: Widget) -> str:
    """Return the wrapped text of a widget."""
    return "\n".join(leaf.render_line(y).text for y in range(leaf.size.height))


def _matches(text: str, pattern: re.Pattern[str]) -> list[Selection]:
    return [
        Selection(_offset(text, match.start()), _offset(text, match.end()))
        for match in pattern.finditer(text)
    ]


def _offset(text: str, at: int) -> Offset:
    return Offset(at - text.rfind("\n", 0, at) - 1, text.count("\n", 0, at))

"""Scrolling view of the conversation: questions, answers and notes.

Only the latest entries have widgets; earlier ones are plain data until the user scrolls up to them, so that a
conversation of hundreds of turns costs no more layout than one of a dozen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from textual import events, on
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message as TextualMessage
from textual.widget import Widget
from textual.widgets import Static

from offspec.chat.branches import Fork
from offspec.chat.conversation import Message
from offspec.ui.tui.answer import Answer, AnswerState
from offspec.ui.tui.transcript_entries import Entry, NoteKind, Question, entries_of, note_of

LIVE = 12  # maximum entries with widgets while the end is in view, since a layout visits all of them
_KEPT = 6  # entries that keep their widgets when earlier ones are pruned
_STEP = 3  # entries revealed at once, so that a key does not wait long for their painting


class TranscriptView(VerticalScroll, can_focus=False):
    """View of the conversation, which follows its end unless the user has scrolled up."""

    @dataclass
    class EndInView(TextualMessage):
        """The end of the conversation came into view or left it."""

        shown: bool

    def __init__(self, welcome: Content | str = "") -> None:
        """welcome: text shown while the conversation is empty."""
        super().__init__(id="transcript")
        self.entries: list[Entry] = []
        self.sources = False
        self._first = 0  # index of the first entry that is a widget
        self._earlier = Static("", id="earlier", markup=False)
        self._earlier.display = False
        self._welcome = Static(welcome, id="welcome", markup=False)
        self._end_shown = True

    async def on_mount(self) -> None:
        await self.mount(self._welcome, self._earlier)
        self.anchor()
        for changing in ("scroll_y", "virtual_size", "size"):
            self.watch(self, changing, self._check_end)

    def _check_end(self) -> None:
        """Check after the layout, because the followed end leaves the view for a moment."""
        self.call_after_refresh(self._post_end_in_view)

    def _post_end_in_view(self) -> None:
        if self._at_end != self._end_shown:
            self._end_shown = self._at_end
            self.post_message(self.EndInView(self._end_shown))

    async def show(
        self, messages: Sequence[Message], waiting: Sequence[Entry] = (), forks: Sequence[Fork] = ()
    ) -> None:
        """Show only these messages and queued questions.

        forks: turns that have several versions.
        """
        before, self.entries = self.entries, [*entries_of(messages, forks), *waiting]
        self._first = len(self.entries)
        self._welcome.display = not self.entries
        await self._remove_widgets(before)
        await self._reveal(max(_STEP, len(waiting)))
        self.anchor()
        self.call_after_refresh(self._fill)

    async def ask(self, text: str, *, waiting: bool = False) -> Entry:
        entry = Entry(text, waiting=waiting)
        await self._add(entry)
        self.anchor()
        return entry

    def send(self, entry: Entry) -> None:
        """Mark a queued question as sent."""
        entry.waiting = False
        if isinstance(entry.widget, Question):
            entry.widget.sent()

    def entry_of(self, widget: Widget) -> Entry:
        return next(entry for entry in self.entries if entry.widget is widget)

    async def begin_answer(self) -> Answer:
        """Add an empty answer after the questions that were sent."""
        entry = Entry(AnswerState())
        await self._add(entry, before=next((e for e in self.entries if e.waiting), None))
        assert isinstance(entry.widget, Answer)
        return entry.widget

    async def note(self, text: str, kind: NoteKind = "say") -> None:
        await self._add(Entry(text, kind))

    async def remove_entry(self, entry: Entry) -> None:
        """Remove an entry."""
        place = self.entries.index(entry)
        del self.entries[place]
        if place < self._first:
            self._first -= 1
        self._welcome.display = not self.entries
        await self._remove_widgets([entry])

    async def remove_messages(self, messages: Sequence[Message]) -> None:
        """Remove these messages from the end, with notes in between.

        If there is no question among them, remove everything below the last question.
        """
        asked = sum(message.role == "user" for message in messages)
        questions = [place for place, entry in enumerate(self.entries) if entry.is_question]
        if not questions:
            return
        start = questions[-min(asked, len(questions))] if asked else questions[-1] + 1
        dropped = self.entries[start:]
        del self.entries[start:]
        self._first = min(self._first, start)
        self._welcome.display = not self.entries
        await self._remove_widgets(dropped)
        if self._first == len(self.entries):
            await self._reveal(_STEP)
            self.call_after_refresh(self._fill)

    async def replace_end(
        self, messages: Sequence[Message], others: Sequence[Message], forks: Sequence[Fork], at: int
    ) -> None:
        """Replace these messages at the end, which begin at index `at` of the conversation, by others."""
        with self.app.batch_update():
            await self.remove_messages(messages)
            for entry in entries_of(others, forks, at):
                await self._add(entry)
        self.anchor()

    def show_sources(self, shown: bool) -> None:
        self.sources = shown
        for answer in self.query(Answer):
            answer.show_sources(shown)

    def toggle_folds(self) -> None:
        """Open or fold the last question, and the reasoning of the last answer."""
        shown = [entry.widget for entry in self.entries if isinstance(entry.widget, Answer | Question)]
        for kind in (Question, Answer):
            of_kind = [widget for widget in shown if isinstance(widget, kind)]
            if of_kind:
                of_kind[-1].toggle()

    @on(events.Click, "#earlier")
    async def _more(self) -> None:
        await self.scroll_pages(-1)

    async def scroll_pages(self, by: int) -> None:
        """Scroll a page up or down, and reveal earlier entries at the top."""
        if by > 0 and self.scroll_y + self._view_height >= self.max_scroll_y:
            self.anchor()  # at the end: follow new text again
        elif by > 0:
            self.scroll_page_down(animate=False)
        elif self.scroll_y > 0 or self._first:
            await self._show_earlier(round(self._content_height - self.scroll_y) + self._view_height)

    async def reveal(self, entry: Entry) -> None:
        """Give a widget to the entry and all entries after it."""
        await self._reveal(self._first - self.entries.index(entry))

    def show_row(self, widget: Widget, row: int) -> None:
        """Scroll to a row of a widget, with some context above it."""
        at = self.scroll_y + widget.region.y + row - self.scrollable_content_region.y
        self.scroll_to(y=max(at - self._view_height // 3, 0), animate=False)

    async def _show_earlier(self, lines: int) -> None:
        """Scroll to `lines` lines before the end, and mount earlier entries until there are as many."""
        if self._first and self._content_height < lines:
            await self._reveal(_STEP)
            self.call_after_refresh(self._show_earlier, lines)
        else:
            self.scroll_to(y=self._content_height - lines, animate=False)

    async def _fill(self) -> None:
        """Reveal earlier entries one by one until there is a page above the visible end."""
        if self._first and self._content_height < 2 * self._view_height and self._at_end:
            await self._reveal(1)
            self.call_after_refresh(self._fill)

    @property
    def _view_height(self) -> int:
        """Height of the view in lines."""
        return self.scrollable_content_region.height

    @property
    def _content_height(self) -> float:
        """Height of the widgets in lines. The virtual size is never less than the view."""
        return self.virtual_size.height + min(self.scroll_y, 0)

    @property
    def _at_end(self) -> bool:
        return self.scroll_y + self._view_height >= self._content_height - 1

    async def _add(self, entry: Entry, before: Entry | None = None) -> None:
        place = len(self.entries) if before is None else self.entries.index(before)
        self.entries.insert(place, entry)
        self._welcome.display = False
        entry.widget = self._widget(entry)
        await self.mount(entry.widget, before=None if before is None else before.widget)
        await self._prune()

    async def _prune(self) -> None:
        """Remove the earliest widgets if there are many, unless the user is reading there."""
        if len(self.entries) - self._first <= LIVE or not self._at_end:
            return
        keep = self._first
        while keep < len(self.entries) - _KEPT and self._is_above_view(self.entries[keep]):
            keep += 1
        past, self._first = self.entries[self._first : keep], keep
        self._count_earlier()
        await self._remove_widgets(past)

    def _is_above_view(self, entry: Entry) -> bool:
        """Return whether an entry is final and above the visible part."""
        if entry.widget is None or not entry.is_settled:
            return False
        region = entry.widget.virtual_region
        return region.width > 0 and region.bottom <= self.scroll_y  # width 0: not laid out yet

    async def _remove_widgets(self, entries: Sequence[Entry]) -> None:
        """Remove the widgets of entries at once, since each removal lays out the whole transcript."""
        widgets = [entry.widget for entry in entries if entry.widget is not None]
        for entry in entries:
            entry.widget = None
        if widgets:
            await self.remove_children(widgets)

    async def _reveal(self, count: int) -> None:
        """Give widgets to the `count` entries before the first entry with one."""
        start = max(0, self._first - max(count, 0))
        widgets = []
        for entry in self.entries[start : self._first]:
            entry.widget = self._widget(entry)
            widgets.append(entry.widget)
        self._first = start
        self._count_earlier()
        await self.mount_all(widgets, after=self._earlier)

    def _count_earlier(self) -> None:
        self._earlier.display = bool(self._first)
        self._earlier.update(f"⋯ {self._first:,} earlier entries (Page Up, or a click)")

    def _widget(self, entry: Entry) -> Widget:
        if isinstance(entry.content, AnswerState):
            return Answer(entry.content, sources=self.sources)
        if entry.kind is None:
            return Question(entry.content, waiting=entry.waiting)
        return note_of(entry.content, entry.kind)

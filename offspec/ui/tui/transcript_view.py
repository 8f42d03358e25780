"""The conversation as it is read: questions, answers, and what the program says, with the end in view.

Only the latest entries are widgets; the earlier ones wait as plain text and come when one scrolls up to them.
So a conversation of hundreds of turns costs no more to lay out than one of a dozen.
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
from offspec.ui.tui.transcript_entries import Entry, Kind, Question, entries_of, note_of

LIVE = 12  # entries that are widgets, at most, while the end is in view: a layout walks all of them
_KEPT = 6  # and that stay when the earlier ones are let go
_STEP = 3  # entries that come at once; a key must not wait for more of them to be painted


class TranscriptView(VerticalScroll, can_focus=False):
    """Stays at its end while text comes, unless the user has scrolled up."""

    @dataclass
    class EndInView(TextualMessage):
        """The end has come into view, or gone out of it."""

        shown: bool

    def __init__(self, welcome: Content | str = "") -> None:
        """welcome: what is shown while there is nothing else."""
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
            self.watch(self, changing, self._look_for_end)

    def _look_for_end(self) -> None:
        """Once all is laid out: text that is followed goes out of view for a moment."""
        self.call_after_refresh(self._tell_of_end)

    def _tell_of_end(self) -> None:
        if self._at_end != self._end_shown:
            self._end_shown = self._at_end
            self.post_message(self.EndInView(self._end_shown))

    async def show(
        self, messages: Sequence[Message], waiting: Sequence[Entry] = (), forks: Sequence[Fork] = ()
    ) -> None:
        """Show these messages and what still waits to be sent, and nothing else.

        forks: the turns that have several versions.
        """
        before, self.entries = self.entries, [*entries_of(messages, forks), *waiting]
        self._first = len(self.entries)
        self._welcome.display = not self.entries
        await self._let_go(before)
        await self._reveal(max(_STEP, len(waiting)))
        self.anchor()
        self.call_after_refresh(self._fill)

    async def ask(self, text: str, *, waiting: bool = False) -> Entry:
        entry = Entry(text, waiting=waiting)
        await self._add(entry)
        self.anchor()
        return entry

    def send(self, entry: Entry) -> None:
        """A question that waited is sent now."""
        entry.waiting = False
        if isinstance(entry.widget, Question):
            entry.widget.sent()

    def entry_of(self, widget: Widget) -> Entry:
        return next(entry for entry in self.entries if entry.widget is widget)

    async def begin_answer(self) -> Answer:
        """An answer without text as yet, at the end of what was sent."""
        entry = Entry(AnswerState())
        await self._add(entry, before=next((e for e in self.entries if e.waiting), None))
        assert isinstance(entry.widget, Answer)
        return entry.widget

    async def note(self, text: str, kind: Kind = "say") -> None:
        await self._add(Entry(text, kind))

    async def remove_entry(self, entry: Entry) -> None:
        """The entry was never there."""
        place = self.entries.index(entry)
        del self.entries[place]
        if place < self._first:
            self._first -= 1
        self._welcome.display = not self.entries
        await self._let_go([entry])

    async def remove_messages(self, messages: Sequence[Message]) -> None:
        """Take these messages away from the end, with what the program said in between.

        Where no question is among them, all that stands below the last one goes.
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
        await self._let_go(dropped)
        if self._first == len(self.entries):
            await self._reveal(_STEP)
            self.call_after_refresh(self._fill)

    async def replace_end(
        self, messages: Sequence[Message], others: Sequence[Message], forks: Sequence[Fork], at: int
    ) -> None:
        """Show other messages in the place of these at the end, which begin at `at` of the conversation."""
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
        """Open or fold what is long in the last question, and the thinking of the last answer."""
        shown = [entry.widget for entry in self.entries if isinstance(entry.widget, Answer | Question)]
        for kind in (Question, Answer):
            of_kind = [widget for widget in shown if isinstance(widget, kind)]
            if of_kind:
                of_kind[-1].toggle()

    @on(events.Click, "#earlier")
    async def _more(self) -> None:
        await self.page(-1)

    async def page(self, by: int) -> None:
        """A page up or down. Before the first page come the entries that had no widget."""
        if by > 0 and self.scroll_y + self._page >= self.max_scroll_y:
            self.anchor()  # there is nothing below: what comes is followed again
        elif by > 0:
            self.scroll_page_down(animate=False)
        elif self.scroll_y > 0 or self._first:
            await self._look_back(round(self._height - self.scroll_y) + self._page)

    async def reveal(self, entry: Entry) -> None:
        """Give the entry a widget, and all after it."""
        await self._reveal(self._first - self.entries.index(entry))

    def show_row(self, widget: Widget, row: int) -> None:
        """Scroll so that a row of a widget is in view, with what is said before it."""
        at = self.scroll_y + widget.region.y + row - self.scrollable_content_region.y
        self.scroll_to(y=max(at - self._page // 3, 0), animate=False)

    async def _look_back(self, lines: int) -> None:
        """Show what is `lines` lines before the end. Earlier entries are mounted until there are as many."""
        if self._first and self._height < lines:
            await self._reveal(_STEP)
            self.call_after_refresh(self._look_back, lines)
        else:
            self.scroll_to(y=self._height - lines, animate=False)

    async def _fill(self) -> None:
        """Let earlier entries come one by one, until there is a page above the end that is in view."""
        if self._first and self._height < 2 * self._page and self._at_end:
            await self._reveal(1)
            self.call_after_refresh(self._fill)

    @property
    def _page(self) -> int:
        """Lines of the view."""
        return self.scrollable_content_region.height

    @property
    def _height(self) -> float:
        """Lines of the widgets. The virtual size is never less than the view, at whose foot a few stand."""
        return self.virtual_size.height + min(self.scroll_y, 0)

    @property
    def _at_end(self) -> bool:
        return self.scroll_y + self._page >= self._height - 1

    async def _add(self, entry: Entry, before: Entry | None = None) -> None:
        place = len(self.entries) if before is None else self.entries.index(before)
        self.entries.insert(place, entry)
        self._welcome.display = False
        entry.widget = self._widget(entry)
        await self.mount(entry.widget, before=None if before is None else before.widget)
        await self._retire()

    async def _retire(self) -> None:
        """Let go of the earliest widgets where there are many, unless the user is reading there."""
        if len(self.entries) - self._first <= LIVE or not self._at_end:
            return
        keep = self._first
        while keep < len(self.entries) - _KEPT and self._is_past(self.entries[keep]):
            keep += 1
        past, self._first = self.entries[self._first : keep], keep
        self._count_earlier()
        await self._let_go(past)

    def _is_past(self, entry: Entry) -> bool:
        """It is settled, and above what is in view."""
        if entry.widget is None or not entry.is_settled:
            return False
        region = entry.widget.virtual_region
        return region.width > 0 and region.bottom <= self.scroll_y  # without a width it is not laid out yet

    async def _let_go(self, entries: Sequence[Entry]) -> None:
        """Remove their widgets, all at once: each removal lays the whole transcript out."""
        widgets = [entry.widget for entry in entries if entry.widget is not None]
        for entry in entries:
            entry.widget = None
        if widgets:
            await self.remove_children(widgets)

    async def _reveal(self, count: int) -> None:
        """Give widgets to the `count` entries before the first that has one."""
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

"""Saved conversations to choose from."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec.chat.archive import Archive, Damaged, Entry


class SessionsScreen(ModalScreen[Path | None]):
    """The newest first. Typing narrows the list; it is dismissed with the file chosen, or None."""

    CSS_PATH = "sessions_screen.tcss"
    AUTO_FOCUS = "#sessions-wanted"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", "Close"),
        Binding("down", "move('cursor_down')", "Down", show=False),
        Binding("up", "move('cursor_up')", "Up", show=False),
        Binding("pagedown", "move('page_down')", "Page down", show=False),
        Binding("pageup", "move('page_up')", "Page up", show=False),
    ]

    def __init__(self, archive: "Archive") -> None:
        super().__init__()
        self._archive = archive
        self._entries: list[Entry] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="sessions") as box:
            box.border_title = "Conversations"
            yield Input(placeholder="part of a title or a model", id="sessions-wanted")
            yield OptionList(id="sessions-list")
            yield Static("looking …", id="sessions-note", markup=False)

    def on_mount(self) -> None:
        self._look()

    @work(thread=True)
    def _look(self) -> None:
        """Read the folder beside the interface: hundreds of files may be on a slow disk."""
        entries = self._archive.list()
        self.app.call_from_thread(self._show, entries)

    def _show(self, entries: list["Entry"]) -> None:
        self._entries = entries
        self._narrow(self.query_one(Input).value)

    def _narrow(self, wanted: str) -> None:
        """List what has all the words that were typed in its title or its model's name."""
        words = wanted.lower().split()
        fitting = [
            entry
            for entry in self._entries
            if all(word in f"{entry.title} {entry.model}".lower() for word in words)
        ]
        options = self.query_one(OptionList)
        options.clear_options()
        options.add_options([Option(_line(entry), id=str(entry.file)) for entry in fitting])
        options.add_options([Option(_unread(damaged), disabled=True) for damaged in self._archive.damaged])
        options.highlighted = 0 if fitting else None
        self.query_one("#sessions-note", Static).update(self._note(len(fitting)))

    def _note(self, fitting: int) -> str:
        if not self._entries:
            note = "No conversation is saved yet."
        else:
            note = f"{fitting:,} of {len(self._entries):,}   ↑ ↓ choose   enter opens   esc closes"
        damaged = len(self._archive.damaged)
        return f"{note}   {damaged:,} cannot be read" if damaged else note

    def on_input_changed(self, event: Input.Changed) -> None:
        self._narrow(event.value)

    def on_input_submitted(self) -> None:
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(Path(str(event.option.id)))

    async def action_move(self, how: str) -> None:
        """The list moves while the field has the keys."""
        await self.query_one(OptionList).run_action(how)


def _line(entry: "Entry") -> Content:
    turns = f"{entry.turns:,} {'question' if entry.turns == 1 else 'questions'}"
    about = f"{_when(entry.updated)}   {entry.model}   {turns}"
    title = printable(entry.title) or "(no title)"
    return Content.assemble((title, "bold"), "\n", (printable(about), "$foreground 60%"))


def _unread(damaged: "Damaged") -> Content:
    name, reason = printable(damaged.file.name), printable(damaged.reason)
    return Content.assemble((name, "bold"), "\n", (reason, "$error"))


def _when(updated: str) -> str:
    """A time of the archive, here: "2026-11-20 14:03"."""
    return datetime.fromisoformat(updated).astimezone().strftime("%Y-%m-%d %H:%M")

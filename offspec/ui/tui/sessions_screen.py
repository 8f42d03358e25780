"""Screen to view, choose, rename and delete saved conversations."""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from offspec.chat.conversation import Conversation
from offspec.core.errors import OffspecError, SessionError
from offspec.ui.chat.reasoning import without_reasoning
from offspec.ui.printable import printable
from offspec_planners.units import format_count

if TYPE_CHECKING:
    from offspec.chat.archive import SessionArchive, SessionEntry, UnreadableSession
    from offspec.chat.message import Message

T = TypeVar("T")

_KEYS = "↑ ↓ choose   enter opens   ctrl+r renames   ctrl+d deletes"
_FIRST, _LAST = 2, 4  # first and last messages of a preview
_PARAGRAPH = 400  # maximum characters of a message in a preview


class SessionsScreen(ModalScreen[Path | None]):
    """List of conversations, newest first, filtered by typing. Its result is the chosen file, or None.

    Args:
        archive: Archive of conversations.
        rename: Function that sets the title of the conversation in a file. Raises OffspecError.
        delete: Function that deletes the conversation in a file. Raises OffspecError.
    """

    CSS_PATH = "sessions_screen.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (20, "-tall")]  # noqa: RUF012 - as Textual declares it
    AUTO_FOCUS = "#sessions-wanted"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,ctrl+c", "dismiss(None)", "Close"),
        Binding("ctrl+r", "rename", "Rename", show=False),
        Binding("ctrl+d", "delete", "Delete", show=False, priority=True),  # in a field it deletes a letter
        Binding("down", "move('cursor_down')", "Down", show=False),
        Binding("up", "move('cursor_up')", "Up", show=False),
        Binding("pagedown", "move('page_down')", "Page down", show=False),
        Binding("pageup", "move('page_up')", "Page up", show=False),
    ]

    def __init__(
        self, archive: "SessionArchive", rename: Callable[[Path, str], None], delete: Callable[[Path], None]
    ) -> None:
        super().__init__()
        self._archive, self._rename, self._delete = archive, rename, delete
        self._entries: list[SessionEntry] = []

    def compose(self) -> ComposeResult:
        with Vertical(id="sessions") as box:
            box.border_title = "Conversations"
            box.border_subtitle = "esc closes"
            yield Input(placeholder="part of a title or a model", id="sessions-wanted")
            with Container(id="sessions-middle"):
                yield OptionList(id="sessions-list")
                with VerticalScroll(id="sessions-preview", can_focus=False):
                    yield Static(markup=False)
            yield Static("loading …", id="sessions-note", markup=False)

    def on_mount(self) -> None:
        self._load_entries()

    @work(thread=True)
    def _load_entries(self) -> None:
        """Read the folder in a background thread: hundreds of files may be on a slow disk."""
        entries = self._archive.list()
        self.app.call_from_thread(self._show, entries)

    def _show(self, entries: list["SessionEntry"]) -> None:
        self._entries = entries
        self._filter(self.query_one(Input).value)

    def _filter(self, wanted: str) -> None:
        """List conversations with all typed words in their title or model name."""
        words = wanted.lower().split()
        fitting = [
            entry
            for entry in self._entries
            if all(word in f"{entry.title} {entry.model}".lower() for word in words)
        ]
        options = self.query_one(OptionList)
        chosen, at = self._chosen, options.highlighted or 0
        options.clear_options()
        options.add_options([Option(_line(entry), id=str(entry.file)) for entry in fitting])
        options.add_options([Option(_unread(damaged), disabled=True) for damaged in self._archive.damaged])
        files = [entry.file for entry in fitting]
        place = files.index(chosen.file) if chosen and chosen.file in files else min(at, len(files) - 1)
        options.highlighted = place if fitting else None
        if not fitting:
            self._load_preview(None)
        self.query_one("#sessions-note", Static).update(self._note(len(fitting)))

    def _note(self, fitting: int) -> str:
        if not self._entries:
            note = "No conversation is saved yet."
        else:
            note = f"{fitting:,} of {len(self._entries):,}   {_KEYS}"
        damaged = len(self._archive.damaged)
        return f"{note}   {damaged:,} cannot be read" if damaged else note

    @property
    def _chosen(self) -> "SessionEntry | None":
        """Highlighted conversation."""
        options = self.query_one(OptionList)
        name = None if options.highlighted is None else options.get_option_at_index(options.highlighted).id
        return next((entry for entry in self._entries if str(entry.file) == name), None)

    def on_option_list_option_highlighted(self) -> None:
        self._load_preview(self._chosen)

    @work(thread=True, exclusive=True, group="preview")
    def _load_preview(self, entry: "SessionEntry | None") -> None:
        """Read a conversation in a background thread, and show its preview if it is still highlighted."""
        shown = Content() if entry is None else _preview(entry)
        self.app.call_from_thread(self._show_preview, entry, shown)

    def _show_preview(self, entry: "SessionEntry | None", shown: Content) -> None:
        if self.is_attached and entry == self._chosen:
            self.query_one("#sessions-preview Static", Static).update(shown)
            self.query_one("#sessions-preview").scroll_home(animate=False)

    @work
    async def action_rename(self) -> None:
        if (entry := self._chosen) is not None:
            title = await self.app.push_screen_wait(NameScreen("Rename", entry.title))
            if title is not None and title != entry.title:
                self._change(partial(self._rename, entry.file, title))

    @work
    async def action_delete(self) -> None:
        if (entry := self._chosen) is not None:
            question = f"Delete {entry.title!r}, {_questions(entry)}? This cannot be undone."
            if await self.app.push_screen_wait(ConfirmScreen("Delete", question)):
                self._change(partial(self._delete, entry.file))

    def _change(self, change: Callable[[], None]) -> None:
        """Change a file and reload the list, or show the error."""
        try:
            change()
        except OffspecError as error:
            note = Content.assemble(("error:", "bold"), " ", printable(str(error)))
            self.query_one("#sessions-note", Static).update(note)
        else:
            self._load_entries()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._filter(event.value)

    def on_input_submitted(self) -> None:
        self.query_one(OptionList).action_select()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(Path(str(event.option.id)))

    async def action_move(self, how: str) -> None:
        """Move in the list while the text field has the focus."""
        await self.query_one(OptionList).run_action(how)


def _line(entry: "SessionEntry") -> Content:
    about = f"{_format_time(entry.updated)}   {entry.model}   {_questions(entry)}"
    title = printable(entry.title) or "(no title)"
    return Content.assemble((title, "bold"), "\n", (printable(about), "$foreground 60%"))


def _questions(entry: "SessionEntry") -> str:
    return format_count(entry.turns, "question")


def _preview(entry: "SessionEntry") -> Content:
    """Return the first and last messages, each cut to a paragraph."""
    try:
        talk = Conversation.read(entry.file)
    except SessionError as error:
        return Content.styled(printable(str(error)), "$error")
    first, last = talk.messages[:_FIRST], talk.messages[_FIRST:][-_LAST:]
    left_out = len(talk.messages) - len(first) - len(last)
    parts = [Content.styled(f"System: {_short(talk.system)}", "italic")] if talk.system else []
    parts += map(_message, first)
    parts += (
        [Content.styled(f"⋯ {format_count(left_out, 'more message')}", "$foreground 60%")] if left_out else []
    )
    parts += map(_message, last)
    return Content("\n\n").join(parts)


def _message(message: "Message") -> Content:
    if message.role == "user":
        return Content.styled(_short(message.content), "bold")
    return Content(_short(without_reasoning(message.content, message.opened)))


def _short(text: str) -> str:
    text = printable(text.strip())
    return text if len(text) <= _PARAGRAPH else f"{text[:_PARAGRAPH].rstrip()} …"


def _unread(damaged: "UnreadableSession") -> Content:
    name, reason = printable(damaged.file.name), printable(damaged.reason)
    return Content.assemble((name, "bold"), "\n", (reason, "$error"))


def _format_time(updated: str) -> str:
    """Format a time of the archive in local time, such as "2026-11-20 14:03"."""
    return datetime.fromisoformat(updated).astimezone().strftime("%Y-%m-%d %H:%M")


class _Dialog(ModalScreen[T]):
    """Small dialog box over a screen."""

    CSS_PATH = "prompt_screens.tcss"

    def __init__(self, title: str, keys: str, asked: Widget) -> None:
        super().__init__()
        self._heading, self._keys, self._asked = title, keys, asked

    def compose(self) -> ComposeResult:
        with Vertical(classes="prompt") as box:
            box.border_title = self._heading
            box.border_subtitle = self._keys
            yield self._asked


class NameScreen(_Dialog[str | None]):
    """Dialog for a text. Its result is the text, or None.

    Args:
        title: Heading of the box.
        name: Initial text.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "Cancel")]

    def __init__(self, title: str, name: str) -> None:
        super().__init__(title, "enter accepts   esc cancels", Input(printable(name), select_on_focus=False))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self.dismiss(event.value)


class ConfirmScreen(_Dialog[bool]):
    """Dialog for a confirmation. Its result is whether the user pressed y.

    Args:
        title: Heading of the box.
        question: Question to confirm with y.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape,ctrl+c", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, question: str) -> None:
        super().__init__(title, "y yes   n no", Static(Content(printable(question))))

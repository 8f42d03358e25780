"""What stands in the transcript beside answers: questions, and what the program itself says."""

from typing import Literal

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from offspec.ui.printable import printable
from offspec.ui.tui.markdown import StreamedMarkdown

SHOWN_LINES = 8
_SHOWN_CHARACTERS = 1000


class Question(Static):
    """waiting: it has not been sent yet, and says so."""

    def __init__(self, text: str, *, waiting: bool = False) -> None:
        super().__init__(markup=False, classes="question")
        self.text = text
        self.waiting = waiting
        self.folded = True
        self._shown = printable(text)
        self._set()

    def sent(self) -> None:
        """It is on its way now."""
        self.waiting = False
        self._set()

    def toggle(self) -> None:
        """Open it, or fold it again."""
        self.folded = not self.folded
        self._set()

    def on_click(self) -> None:
        self.toggle()

    def _set(self) -> None:
        self.set_class(self.waiting, "waiting")
        shown = folded(self._shown) if self.folded else self._shown
        self.update(Content(f"{shown}\n⋯ waits to be sent" if self.waiting else shown))


def folded(text: str) -> str:
    """The text, or its beginning and how much more there is."""
    lines = text.splitlines()
    shown = "\n".join(lines[:SHOWN_LINES])[:_SHOWN_CHARACTERS]
    if len(lines) <= SHOWN_LINES and len(text) <= _SHOWN_CHARACTERS:
        return text
    count = f"{len(lines):,} lines, " if len(lines) > 1 else ""
    return f"{shown}\n⋯ {count}{len(text):,} characters in all (F2 or a click opens it)"


Kind = Literal["say", "notice", "error"]


def note_of(text: str, kind: Kind = "say") -> Widget:
    """What a command says is Markdown. The others are not: there are titles, paths and names in them."""
    text = printable(text)
    shown = StreamedMarkdown(text) if kind == "say" else PlainNote(text, kind)
    shown.add_class("note", kind)
    return shown


class PlainNote(Static):
    """An error begins with its name, so that it is one without colour too."""

    DEFAULT_CSS = """
    PlainNote {
        margin: 0 0 1 0;
        padding: 0 2;
    }
    """

    def __init__(self, text: str, kind: Kind) -> None:
        said = Content(text)
        super().__init__(Content.assemble(("error:", "bold"), " ", said) if kind == "error" else said)

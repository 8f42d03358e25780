"""What the program itself says in the transcript: replies of commands, notices, errors."""

from typing import Literal

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from offspec.ui.printable import printable
from offspec.ui.tui.prose import Prose

Kind = Literal["say", "notice", "error"]


def note_of(text: str, kind: Kind = "say") -> Widget:
    """What a command says is Markdown. The others are not: there are titles, paths and names in them."""
    text = printable(text)
    shown = Prose(text) if kind == "say" else PlainNote(text, kind)
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

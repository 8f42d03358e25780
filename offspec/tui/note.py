"""What the program itself says in the transcript: replies of commands, notices, errors."""

from typing import Literal

from offspec.chatting.printable import printable
from offspec.tui.prose import Prose

Kind = Literal["say", "notice", "error"]


class Note(Prose):
    """An error begins with its name, so that it is one without colour too."""

    def __init__(self, text: str, kind: Kind = "say") -> None:
        text = printable(text)
        super().__init__(f"**error:** {text}" if kind == "error" else text)
        self.add_class("note", kind)

"""What stands in the transcript: answers, questions, and what the program itself says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from offspec.chat.branches import Fork
from offspec.chat.conversation import Message
from offspec.ui.printable import printable
from offspec.ui.tui.answer import AnswerState, ending_of
from offspec.ui.tui.markdown import StreamedMarkdown

Kind = Literal["say", "notice", "error"]

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


def note_of(text: str, kind: Kind = "say") -> Widget:
    """What a command says is Markdown. The others are not: there are titles, paths and names in them.

    An error begins with its name, so that it is one without colour too.
    """
    text = printable(text)
    said = Content(text)
    if kind == "error":
        said = Content.assemble(("error:", "bold"), " ", said)
    shown = StreamedMarkdown(text) if kind == "say" else Static(said)
    shown.add_class("note", kind)
    return shown


@dataclass(slots=True, eq=False)
class Entry:
    """One thing in the transcript: what it shows, and its widget while it has one. Equal to itself only."""

    content: str | AnswerState
    kind: Kind | None = None  # of a note
    waiting: bool = False  # a question that has not been sent
    widget: Widget | None = None

    @property
    def is_question(self) -> bool:
        return self.kind is None and isinstance(self.content, str)

    @property
    def is_settled(self) -> bool:
        """Nothing more will come of it: no question that waits, no answer under way."""
        return self.content.over if isinstance(self.content, AnswerState) else not self.waiting

    @property
    def text(self) -> str:
        return self.content.text if isinstance(self.content, AnswerState) else self.content


def entries_of(messages: Sequence[Message], forks: Sequence[Fork], start: int = 0) -> Iterator[Entry]:
    """What shows these messages, the first of which is the one at `start` of the conversation."""
    several = {fork.at: fork for fork in forks}
    for at, message in enumerate(messages, start):
        fork = several.get(at if message.role == "user" else at - 1)
        if message.role == "assistant":
            text, ending = printable(message.content), ending_of(message.finish)
            yield Entry(AnswerState(text, printable(message.opened), ending=ending, over=True, fork=fork))
            continue
        yield Entry(message.content)
        if fork is not None and at + 1 == start + len(messages):  # its answer never came
            yield Entry(AnswerState(over=True, fork=fork))

"""Transcript widgets: answers, questions, and messages of the program."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from offspec.chat.branches import Fork
from offspec.chat.conversation import Message
from offspec.ui.printable import printable
from offspec.ui.tui.answer import AnswerState, ending_line
from offspec.ui.tui.markdown import StreamedMarkdown

NoteKind = Literal["say", "notice", "error"]

SHOWN_LINES = 8
_SHOWN_CHARACTERS = 1000


class Question(Static):
    """Widget of a question. waiting: whether it is queued, which is shown."""

    def __init__(self, text: str, *, waiting: bool = False) -> None:
        super().__init__(markup=False, classes="question")
        self.text = text
        self.waiting = waiting
        self.folded = True
        self._shown = printable(text)
        self._set()

    def sent(self) -> None:
        """Mark the question as sent."""
        self.waiting = False
        self._set()

    def toggle(self) -> None:
        """Open or fold the question."""
        self.folded = not self.folded
        self._set()

    def on_click(self) -> None:
        self.toggle()

    def _set(self) -> None:
        self.set_class(self.waiting, "waiting")
        shown = fold_text(self._shown) if self.folded else self._shown
        self.update(Content(f"{shown}\n⋯ queued" if self.waiting else shown))


def fold_text(text: str) -> str:
    """Return the text, or its beginning with the length of a long one."""
    lines = text.splitlines()
    shown = "\n".join(lines[:SHOWN_LINES])[:_SHOWN_CHARACTERS]
    if len(lines) <= SHOWN_LINES and len(text) <= _SHOWN_CHARACTERS:
        return text
    count = f"{len(lines):,} lines, " if len(lines) > 1 else ""
    return f"{shown}\n⋯ {count}{len(text):,} characters total (F2 or a click opens it)"


def note_of(text: str, kind: NoteKind = "say") -> Widget:
    """Make a note widget. Only output of commands is Markdown; notices and errors contain paths and names.

    An error begins with "error:", so that it is recognizable without colour.
    """
    text = printable(text)
    content = Content(text)
    if kind == "error":
        content = Content.assemble(("error:", "bold"), " ", content)
    shown = StreamedMarkdown(text) if kind == "say" else Static(content)
    shown.add_class("note", kind)
    return shown


@dataclass(slots=True, eq=False)
class Entry:
    """Entry of the transcript: content, and its widget while it has one. Compared by identity."""

    content: str | AnswerState
    kind: NoteKind | None = None  # kind of a note; None for questions and answers
    waiting: bool = False  # whether it is a queued question
    widget: Widget | None = None

    @property
    def is_question(self) -> bool:
        return self.kind is None and isinstance(self.content, str)

    @property
    def is_settled(self) -> bool:
        """Whether the entry is final: neither a queued question nor a running answer."""
        return self.content.finished if isinstance(self.content, AnswerState) else not self.waiting

    @property
    def text(self) -> str:
        return self.content.text if isinstance(self.content, AnswerState) else self.content


def entries_of(messages: Sequence[Message], forks: Sequence[Fork], start: int = 0) -> Iterator[Entry]:
    """Yield entries for messages, the first of which is at index `start` of the conversation."""
    several = {fork.at: fork for fork in forks}
    for at, message in enumerate(messages, start):
        fork = several.get(at if message.role == "user" else at - 1)
        if message.role == "assistant":
            text, ending = printable(message.content), ending_line(message.finish)
            yield Entry(AnswerState(text, printable(message.opened), ending=ending, finished=True, fork=fork))
            continue
        yield Entry(message.content)
        if fork is not None and at + 1 == start + len(messages):  # the question has no answer
            yield Entry(AnswerState(finished=True, fork=fork))

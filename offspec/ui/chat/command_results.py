"""Results of slash commands, for a user interface to display or execute."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offspec.core.config import EngineConfig
from offspec.core.events import Event

if TYPE_CHECKING:
    from offspec.chat.conversation import Message

View = Literal["help", "tree", "stats", "plan", "sessions"]


@dataclass(frozen=True, slots=True)
class ShowText:
    """Text to display that is not part of the conversation."""

    markdown: str


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """An answer to run and to stream.

    events: generator to run in the thread of answers. question: the question, if it is not shown yet.
    dropped: messages to remove from the end of the display first; they return if the answer is refused or
    stays empty.
    """

    events: Generator[Event, None, None]
    question: str | None
    dropped: "tuple[Message, ...]" = ()


@dataclass(frozen=True, slots=True)
class TurnsRemoved:
    """Messages that are no longer part of the conversation."""

    dropped: "tuple[Message, ...]"


@dataclass(frozen=True, slots=True)
class BranchSwitched:
    """Switch to another version of a turn and everything after it.

    at: index of its first message. dropped: messages to remove from the end of the display. shown: messages
    that replace them. which: position of the version, such as "2 of 3".
    """

    at: int
    dropped: "tuple[Message, ...]"
    shown: "tuple[Message, ...]"
    which: str


@dataclass(frozen=True, slots=True)
class EditQuestion:
    """Request to let the user edit and send the last question; nothing has changed yet.

    question: the question as asked. line: the command for the user to edit.
    """

    question: str
    line: str


@dataclass(frozen=True, slots=True)
class SuggestCommand:
    """Command that had no effect, with the reason in Markdown, and a line to send instead."""

    reason: str
    line: str


@dataclass(frozen=True, slots=True)
class NewConversation:
    """Another conversation, to show from its beginning, with a note below."""

    note: str


@dataclass(frozen=True, slots=True)
class OpenView:
    """View to open."""

    view: View


@dataclass(frozen=True, slots=True)
class ShowSources:
    """Whether answers show the source of each token."""

    shown: bool


@dataclass(frozen=True, slots=True)
class Reload:
    """Request to load the model with other settings, without the plan file, which is for a single draft."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class CopyToClipboard:
    """Text for the clipboard. what: its description, such as "the last answer"."""

    text: str
    what: str


@dataclass(frozen=True, slots=True)
class Quit:
    """Request to exit."""


CommandResult = (
    ShowText
    | StreamAnswer
    | TurnsRemoved
    | BranchSwitched
    | EditQuestion
    | SuggestCommand
    | NewConversation
    | OpenView
    | ShowSources
    | Reload
    | CopyToClipboard
    | Quit
)

"""What came of a command, for a user interface to show or to do."""

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
    """Something to read, which is not part of the conversation."""

    markdown: str


@dataclass(frozen=True, slots=True)
class StreamAnswer:
    """An answer to run, where answers are run, and to show as it comes.

    dropped: messages to take away from the end of what is shown, first; they are there again where the answer
    is refused, or nothing comes of it. question: what is asked, where that is not shown yet.
    """

    events: Generator[Event, None, None]
    question: str | None
    dropped: "tuple[Message, ...]" = ()


@dataclass(frozen=True, slots=True)
class Rewound:
    """These messages are no longer part of the conversation."""

    dropped: "tuple[Message, ...]"


@dataclass(frozen=True, slots=True)
class Switched:
    """Another version of a turn, and what followed it, is shown from now on.

    at: where it begins in the messages. dropped: messages to take away from the end of what is shown. shown:
    those in their place. which: "2 of 3".
    """

    at: int
    dropped: "tuple[Message, ...]"
    shown: "tuple[Message, ...]"
    which: str


@dataclass(frozen=True, slots=True)
class EditQuestion:
    """The last question is to be changed and sent; nothing has changed yet.

    question: as it was asked. line: the command to change, as it is typed.
    """

    question: str
    line: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Nothing was done, for a reason; a line to send in place of the command.

    reason: in Markdown.
    """

    reason: str
    line: str


@dataclass(frozen=True, slots=True)
class Reset:
    """Another conversation has begun; show it from its beginning, with a note below."""

    note: str


@dataclass(frozen=True, slots=True)
class OpenView:
    """A view to look at."""

    view: View


@dataclass(frozen=True, slots=True)
class ShowSources:
    """Whether answers show where their tokens came from."""

    shown: bool


@dataclass(frozen=True, slots=True)
class Reload:
    """The model is to be loaded with other settings, without a plan file: one is made for a single draft."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Copy:
    """Text for the clipboard. what: its name for a person, such as "the last answer"."""

    text: str
    what: str


@dataclass(frozen=True, slots=True)
class Quit:
    """The user wants to leave."""


Outcome = (
    ShowText
    | StreamAnswer
    | Rewound
    | Switched
    | EditQuestion
    | Offer
    | Reset
    | OpenView
    | ShowSources
    | Reload
    | Copy
    | Quit
)

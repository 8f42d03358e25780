"""What the engine's thread tells the screen. Each is posted to the app, from whichever thread."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

from offspec.core.events import LoadProgress, PassStats, Piece, Result

if TYPE_CHECKING:
    from offspec.ui.chat.controller import ChatController


@dataclass
class Loading(Message):
    """A model is being opened; how far it has come."""

    event: LoadProgress


@dataclass
class Loaded(Message):
    """A model is open. notes: lines that the user should read, the earliest first."""

    controller: "ChatController"
    notes: tuple[str, ...] = ()


@dataclass
class LoadFailed(Message):
    """No model is open."""

    error: BaseException


@dataclass
class Counted(Message):
    """The tokens of the conversation were counted again."""


@dataclass
class AnswerStarted(Message):
    """An answer has begun. opened: what the chat template began it with."""

    opened: str


@dataclass
class AnswerText(Message):
    """More of the answer: text that is now final, and the same token by token."""

    text: str
    pieces: tuple[Piece, ...]


@dataclass
class PassDone(Message):
    """A pass is over."""

    stats: PassStats


@dataclass
class Noticed(Message):
    """A line that the user should know."""

    text: str


@dataclass
class AnswerDone(Message):
    """An answer is over: with its result, or with what broke it off."""

    result: Result | None = None
    error: BaseException | None = None

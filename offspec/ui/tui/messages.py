"""What the engine's thread tells the screen. Each is posted to the app, from whichever thread."""

from typing import TYPE_CHECKING

from textual.message import Message

from offspec.core.events import LoadProgress, PassStats, Piece, Result

if TYPE_CHECKING:
    from offspec.ui.chat.controller import ChatController


class Loading(Message):
    """A model is being opened; how far it has come."""

    def __init__(self, event: LoadProgress) -> None:
        super().__init__()
        self.event = event


class Loaded(Message):
    """A model is open. notes: lines that the user should read, the earliest first."""

    def __init__(self, controller: "ChatController", notes: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.controller = controller
        self.notes = notes


class LoadFailed(Message):
    """No model is open, and none will be."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class AnswerStarted(Message):
    """An answer has begun. opened: what the chat template began it with."""

    def __init__(self, opened: str) -> None:
        super().__init__()
        self.opened = opened


class AnswerText(Message):
    """More of the answer: text that is now final, and the same token by token."""

    def __init__(self, text: str, pieces: tuple[Piece, ...]) -> None:
        super().__init__()
        self.text = text
        self.pieces = pieces


class PassDone(Message):
    """A pass is over."""

    def __init__(self, stats: PassStats) -> None:
        super().__init__()
        self.stats = stats


class Noticed(Message):
    """A line that the user should know."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class AnswerDone(Message):
    """An answer is over: with its result, or with what broke it off."""

    def __init__(self, result: Result | None = None, error: Exception | None = None) -> None:
        super().__init__()
        self.result = result
        self.error = error

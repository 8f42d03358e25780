"""The line at the top and the one above the composer: the model, what the machine is doing, the context."""

from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

from offspec.ui.printable import printable

if TYPE_CHECKING:
    from offspec.ui.chat.controller import ChatController

_CELLS = 8  # of the meter
_NARROW = 60


class Header(Static):
    """Repaints only what changed."""

    def __init__(self, model: str) -> None:
        self._shown = printable(_short(model))
        super().__init__(Content(self._shown), id="header", markup=False)

    def update_from(self, controller: "ChatController") -> None:
        engine, title = controller.engine, controller.session.conversation.title
        parts = (_short(engine.config.model), f"draft {_short(engine.draft)}", title)
        shown = printable(" · ".join(part for part in parts if part))
        if shown != self._shown:
            self._shown = shown
            self.update(Content(shown), layout=False)


def _short(model: str) -> str:
    """The last part of a path; a hub id keeps its owner."""
    return PurePath(model).name if model.startswith(("/", ".", "~")) or model.count("/") > 1 else model


class StatusLine(Horizontal):
    """Repaints only what changed."""

    def __init__(self) -> None:
        super().__init__(id="status")
        self._left = self._right = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="doing", markup=False)
        yield Static("↓ more below", id="below", markup=False)
        yield Static("", id="meter", markup=False)

    def on_mount(self) -> None:
        self.more_below(False)

    def more_below(self, there_is: bool) -> None:
        """Whether the conversation goes on below what is shown."""
        self.query_one("#below").display = there_is

    def doing(self, text: str) -> None:
        """What is being done, or a hint; the latest stays."""
        text = printable(text)
        if text != self._left:
            self._left = text
            self.query_one("#doing", Static).update(Content(text), layout=False)

    def context(self, used: int, room: int) -> None:
        """used: tokens of the conversation, of the `room` that there are."""
        text = meter(used, room, narrow=self.app.size.width < _NARROW)
        if text != self._right:
            fits = cell_len(text) == cell_len(self._right)  # else the line is laid out again: slow
            self._right = text
            self.query_one("#meter", Static).update(Content(text), layout=not fits)


def meter(used: int, room: int, *, narrow: bool = False) -> str:
    """How full the context is. Anything above nothing shows."""
    share = min(1.0, used / room) if room else 0.0
    if narrow:
        return f"{share:.0%}"
    full = max(round(share * _CELLS), 1 if used else 0)
    return f"{used:,} of {room:,} tokens {'▰' * full}{'▱' * (_CELLS - full)}"

"""The line above the composer: what the machine is doing, and how full the context is."""

from rich.cells import cell_len
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.widgets import Static

_CELLS = 8  # of the meter
_NARROW = 60


class StatusLine(Horizontal):
    """Repaints only what changed."""

    def __init__(self) -> None:
        super().__init__(id="status")
        self._left = self._right = ""

    def compose(self) -> ComposeResult:
        yield Static("", id="doing", markup=False)
        yield Static("", id="meter", markup=False)

    def doing(self, text: str) -> None:
        """What is being done, or a hint; the latest stays."""
        if text != self._left:
            self._left = text
            self.query_one("#doing", Static).update(Content(text), layout=False)

    def context(self, used: int, room: int) -> None:
        """used: tokens of the conversation, of the `room` that there are."""
        text = meter(used, room, narrow=self.app.size.width < _NARROW)
        if text != self._right:
            fits = cell_len(text) == cell_len(self._right)  # else the line is laid out anew, which costs more
            self._right = text
            self.query_one("#meter", Static).update(Content(text), layout=not fits)


def meter(used: int, room: int, *, narrow: bool = False) -> str:
    """How full the context is. Anything above nothing shows."""
    share = min(1.0, used / room) if room else 0.0
    if narrow:
        return f"{share:.0%}"
    full = max(round(share * _CELLS), 1 if used else 0)
    return f"{used:,} of {room:,} tokens {'▰' * full}{'▱' * (_CELLS - full)}"

"""The field for a search in the conversation, between transcript and composer."""

from dataclasses import dataclass
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.content import Content
from textual.message import Message
from textual.widgets import Input, Static


class SearchBar(Horizontal):
    """Shown while one searches."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", show=False),
        Binding("enter,up", "step(-1)", show=False, priority=True),
        Binding("shift+enter,down", "step(1)", show=False),
        Binding("pageup", "app.page(-1)", show=False),
        Binding("pagedown", "app.page(1)", show=False),
    ]

    @dataclass
    class Sought(Message):
        """The user seeks these words. by: 0: other words; -1, 1: the place above or below."""

        words: str
        by: int

    class Closed(Message):
        """The search is over."""

    def __init__(self) -> None:
        super().__init__(id="search")
        self.display = False

    def compose(self) -> ComposeResult:
        yield Static("Find ", markup=False)
        yield Input(placeholder="words · ↑ ↓ go through the places · esc closes", compact=True)
        yield Static("", id="search-place", markup=False)

    def open(self) -> None:
        """Take the keys; what was sought last is there again."""
        self.display = True
        self.query_one(Input).focus()
        self.action_step(0)

    def show_place(self, text: str) -> None:
        """Say which place is shown, such as "2 of 7"."""
        self.query_one("#search-place", Static).update(Content(text))

    def action_step(self, by: int) -> None:
        self.post_message(self.Sought(self.query_one(Input).value, by))

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed())

    @on(Input.Changed)
    def _changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.display:
            self.action_step(0)

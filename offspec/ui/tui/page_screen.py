"""A page of Markdown over the conversation, to read and close."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen

from offspec.ui.tui.prose import Prose


class PageScreen(ModalScreen[None]):
    """A title, a text that scrolls, and the key that closes it."""

    CSS_PATH = "page_screen.tcss"
    AUTO_FOCUS = "#page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "close", "Close"),
        Binding("ctrl+c", "copy_text", show=False),  # passes where nothing is selected
        Binding("ctrl+c", "close", show=False),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, title: str, markdown: str) -> None:
        super().__init__()
        self._heading, self._markdown = title, markdown

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page") as page:
            page.border_title = Content(self._heading)
            page.border_subtitle = "esc closes   ↑ ↓ scroll"
            yield Prose(self._markdown)

    def action_close(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one("#page").scroll_relative(y=lines, animate=False)

"""A page of Markdown over the conversation, to read and close; one of them is the help."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget

from offspec.ui.chat.commands import COMMANDS
from offspec.ui.printable import printable
from offspec.ui.tui.markdown import StreamedMarkdown

KEYS = (
    ("Enter", "send the question"),
    ("Shift+Enter, Ctrl+J", "a new line in it"),
    ("Tab", "complete a command"),
    ("Ctrl+U", "empty the input"),
    ("Ctrl+_, Ctrl+Y", "undo and redo changes of the input"),
    ("↑ ↓", "earlier and later questions, from the first and last line"),
    ("Esc", "stop the answer; what came is kept"),
    ("Ctrl+R", "ask the last question again; its answer is kept"),
    ("← →", "earlier and later versions of an answer, while the input is empty"),
    ("Ctrl+T", "the tree of the last pass, and those before it"),
    ("Ctrl+O", "colour the answers' tokens by where they came from"),
    ("Ctrl+B", "show or hide the side panel"),
    ("Ctrl+L", "begin a new conversation"),
    ("F2", "open or fold thinking"),
    ("Page Up, Page Down", "scroll the conversation"),
    ("Ctrl+F", "search in the conversation; ↑ ↓ go through the places"),
    ("Ctrl+End", "go to the end of the conversation, and follow what comes"),
    ("Ctrl+P", "find a command or a theme"),
    ("F1", "this page"),
    ("Ctrl+C", "copy what is selected; else stop the answer, or leave when pressed twice"),
    ("Ctrl+Z", "suspend the chat; `fg` in the shell continues it"),
    ("Ctrl+Q", "leave; the conversation is saved"),
)


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
        self._heading, self._markdown = printable(title), printable(markdown)

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page") as page:
            page.border_title = Content(self._heading)
            page.border_subtitle = "esc closes   ↑ ↓ scroll"
            yield self.content()

    def content(self) -> Widget:
        """What the page shows."""
        return StreamedMarkdown(self._markdown)

    def action_close(self) -> None:
        self.dismiss()

    def action_scroll(self, lines: int) -> None:
        self.query_one("#page").scroll_relative(y=lines, animate=False)


class HelpScreen(PageScreen):
    """The keys first, then the commands."""

    def __init__(self) -> None:
        super().__init__("Help", help_page())


def help_page() -> str:
    """Keys and commands as Markdown."""
    keys = "\n".join(f"| {key} | {what} |" for key, what in KEYS)
    commands = "\n".join(
        f"| `{command.usage.replace('|', chr(92) + '|')}` | {command.help} |" for command in COMMANDS.values()
    )
    return f"| key | |\n|---|---|\n{keys}\n\n| command | |\n|---|---|\n{commands}\n"

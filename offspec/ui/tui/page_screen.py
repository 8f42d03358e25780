"""Pages shown over the conversation: Markdown such as the help, and the plan."""

import io
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widget import Widget

from offspec.ui.chat.commands import COMMANDS
from offspec.ui.cli.console import Console
from offspec.ui.printable import printable
from offspec.ui.tui.markdown import StreamedMarkdown

if TYPE_CHECKING:
    from offspec_planners.plan import Plan

KEYS = (
    ("Enter", "send the question"),
    ("Shift+Enter, Ctrl+J", "begin a new line"),
    ("Tab", "complete a command"),
    ("Ctrl+U", "clear the input"),
    ("Ctrl+_, Ctrl+Y", "undo and redo changes of the input"),
    ("↑ ↓", "recall earlier and later questions, from the first and last line"),
    ("Esc", "stop the answer; its text so far is kept"),
    ("Ctrl+R", "answer the last question again; the previous answer is kept"),
    ("← →", "earlier and later versions of an answer, while the input is empty"),
    ("Ctrl+T", "show the tree of the last pass and of earlier ones"),
    ("Ctrl+O", "colour the tokens of answers by source"),
    ("Ctrl+B", "show or hide the side panel"),
    ("Ctrl+L", "begin a new conversation"),
    ("F2", "open or fold reasoning"),
    ("Page Up, Page Down", "scroll the conversation"),
    ("Ctrl+F", "search the conversation; ↑ ↓ step through matches"),
    ("Ctrl+End", "go to the end of the conversation, and follow new text"),
    ("Ctrl+P", "find a command or a theme"),
    ("F1", "this page"),
    ("Ctrl+C", "copy the selection; otherwise stop the answer, or exit when pressed twice"),
    ("Ctrl+Z", "suspend the chat; `fg` in the shell continues it"),
    ("Ctrl+Q", "exit; the conversation is saved"),
)


class PageScreen(ModalScreen[None]):
    """Page with a title and scrolling content.

    Args:
        title: Heading of the box.
        shown: Content: Markdown, or a widget.
    """

    CSS_PATH = "page_screen.tcss"
    AUTO_FOCUS = "#page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close"),
        Binding("ctrl+c", "copy_text", show=False),  # falls through if nothing is selected
        Binding("ctrl+c", "dismiss", show=False),
        Binding("j", "scroll(1)", "Down", show=False),
        Binding("k", "scroll(-1)", "Up", show=False),
    ]

    def __init__(self, title: str, shown: str | Widget) -> None:
        super().__init__()
        self._heading = printable(title)
        self._shown = StreamedMarkdown(printable(shown)) if isinstance(shown, str) else shown

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="page") as page:
            page.border_title = Content(self._heading)
            page.border_subtitle = "esc closes   ↑ ↓ scroll"
            yield self._shown

    def action_scroll(self, lines: int) -> None:
        self.query_one("#page").scroll_relative(y=lines, animate=False)


def help_screen() -> PageScreen:
    return PageScreen("Help", help_page())


def help_page() -> str:
    """Return tables of keys and commands in Markdown."""
    keys = "\n".join(f"| {key} | {what} |" for key, what in KEYS)
    commands = "\n".join(
        f"| `{command.usage.replace('|', chr(92) + '|')}` | {command.help} |" for command in COMMANDS.values()
    )
    return f"| key | |\n|---|---|\n{keys}\n\n| command | |\n|---|---|\n{commands}\n"


class PlanPage(Widget):
    """The page of `offspec plan`, as wide as the screen."""

    DEFAULT_CSS = "PlanPage { height: auto; }"

    def __init__(self, plan: "Plan") -> None:
        super().__init__()
        self._plan = plan
        self._drawn = 0, Content()  # width in columns, and the page at that width

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._at(width).plain.count("\n") + 1

    def render(self) -> Content:
        return self._at(self.content_size.width)

    def _at(self, width: int) -> Content:
        if self._drawn[0] != width:
            self._drawn = width, _drawn(self._plan, width)
        return self._drawn[1]


def _drawn(plan: "Plan", width: int) -> Content:
    from offspec.ui.cli.plan_page import render  # imported late: it needs numpy

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
    )
    return Content.from_rich_text(Text.from_ansi(render(console, plan).rstrip("\n")))

"""Pages over the conversation, to read and close: Markdown such as the help, and the plan."""

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
    """A title, a text that scrolls, and the key that closes it.

    Args:
        title: The heading of the box.
        shown: Markdown, or a widget.
    """

    CSS_PATH = "page_screen.tcss"
    AUTO_FOCUS = "#page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,enter", "dismiss", "Close"),
        Binding("ctrl+c", "copy_text", show=False),  # passes where nothing is selected
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
    """Keys and commands as Markdown, the keys first."""
    keys = "\n".join(f"| {key} | {what} |" for key, what in KEYS)
    commands = "\n".join(
        f"| `{command.usage.replace('|', chr(92) + '|')}` | {command.help} |" for command in COMMANDS.values()
    )
    return f"| key | |\n|---|---|\n{keys}\n\n| command | |\n|---|---|\n{commands}\n"


class PlanPage(Widget):
    """The page that `offspec plan` prints, as wide as the screen."""

    DEFAULT_CSS = "PlanPage { height: auto; }"

    def __init__(self, plan: "Plan") -> None:
        super().__init__()
        self._plan = plan
        self._drawn = 0, Content()  # for so many columns

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._at(width).plain.count("\n") + 1

    def render(self) -> Content:
        return self._at(self.content_size.width)

    def _at(self, width: int) -> Content:
        if self._drawn[0] != width:
            self._drawn = width, _drawn(self._plan, width)
        return self._drawn[1]


def _drawn(plan: "Plan", width: int) -> Content:
    from offspec.ui.cli.plan_page import render  # numpy

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
    )
    return Content.from_rich_text(Text.from_ansi(render(console, plan).rstrip("\n")))

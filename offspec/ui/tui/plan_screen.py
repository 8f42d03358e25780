"""The plan of the chat: the page that `offspec plan` prints, as wide as the screen."""

import io
from typing import TYPE_CHECKING

from rich.text import Text
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from offspec.ui.cli.console import Console
from offspec.ui.tui.page_screen import PageScreen

if TYPE_CHECKING:
    from offspec_planners.plan import Plan


class PlanScreen(PageScreen):
    """Keys as of every page."""

    def __init__(self, plan: "Plan") -> None:
        super().__init__("Plan", "")
        self._plan = plan

    def content(self) -> Widget:
        return _PlanPage(self._plan)


class _PlanPage(Widget):
    DEFAULT_CSS = "_PlanPage { height: auto; }"

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
            self._drawn = width, Content.from_rich_text(Text.from_ansi(_page(self._plan, width)))
        return self._drawn[1]


def _page(plan: "Plan", width: int) -> str:
    from offspec.ui.cli.plan_page import render  # numpy

    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="standard",
        legacy_windows=False,
        highlight=False,
    )
    return render(console, plan).rstrip("\n")

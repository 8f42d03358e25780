"""The panel beside the conversation: how fast it goes, where the time goes, and what lies where."""

import weakref
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from offspec.ui.tui import figures_text

if TYPE_CHECKING:
    from offspec.ui.chat.controller import Desk
    from offspec.ui.chat.setup import ChatEngine

_SECTIONS = {
    "speed": "Speed",
    "split": "The last pass",
    "spark": "Tokens of each pass",
    "memory": "Memory",
    "plan": "Plan",
    "session": "Session",
}


class SidePanel(VerticalScroll, can_focus=False):
    """Figures of the desk. A section is painted again only when its text has changed."""

    def __init__(self) -> None:
        super().__init__()
        # Whose memory and plan are shown: weak, or a model that was closed would stay in memory.
        self._engine: weakref.ref[ChatEngine] | None = None

    def compose(self) -> ComposeResult:
        for name, title in _SECTIONS.items():
            yield Static(title, classes="panel-title", markup=False)
            yield _Section(id=f"panel-{name}")

    def update_from(self, desk: "Desk") -> None:
        """Show what the desk knows now."""
        if not self.display or not self.is_mounted:
            return
        shown = {
            "speed": figures_text.speed(desk.figures),
            "split": figures_text.split(desk.figures.last_split),
            "spark": figures_text.sparkline(desk.figures.history),
            "session": figures_text.session(desk),
        }
        if self._engine is None or self._engine() is not desk.engine:
            self._engine = weakref.ref(desk.engine)
            shown["memory"] = figures_text.memory(desk.engine)
            shown["plan"] = figures_text.plan_line(desk.engine)
        for name, content in shown.items():
            self.query_one(f"#panel-{name}", _Section).show(content)


class _Section(Static):
    """Lines that are cut where the panel ends, so that the height is their number."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._shown = Content()

    def show(self, content: Content) -> None:
        if content.plain == self._shown.plain:
            return
        taller = content.plain.count("\n") != self._shown.plain.count("\n") or not self._shown
        self._shown = content
        self.update(content, layout=taller)

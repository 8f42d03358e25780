"""The drawing of a tree, of which only the lines on the screen are painted."""

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from offspec.ui.tui.tree_drawing import Line


class TreeView(ScrollView, can_focus=False):
    """Lines that scroll both ways. The keys are the screen's, where the arrows mean passes too."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {
        "tree--plain",
        "tree--accepted",
        "tree--rejected",
        "tree--probability",
        "tree--branch",
        "tree--bonus",
    }

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        """Draw these lines from now on; the place that is looked at stays where there is such a place."""
        self._lines = lines
        width = max((sum(cell_len(span.text) for span in line) for line in lines), default=0)
        self.virtual_size = Size(width, len(lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Line y of the screen."""
        left, top = self.scroll_offset
        width, plain = self.size.width, self.rich_style
        if top + y >= len(self._lines):
            return Strip.blank(width, plain)
        segments = [
            Segment(span.text, self.get_component_rich_style(f"tree--{span.style}"))
            for span in self._lines[top + y]
        ]
        return Strip(segments).crop_extend(left, left + width, plain)

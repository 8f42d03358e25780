"""A widget of Markdown that grows at its end."""

from textual.app import RenderResult
from textual.geometry import Region, Size
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget

from offspec.ui.tui.markdown_lines import Line, MarkdownLines


class Prose(Widget, can_focus=False):
    """Paints the lines that changed, and is laid out anew only where their number does."""

    DEFAULT_CSS = "Prose { height: auto; width: 1fr; }"

    def __init__(self, markdown: str = "") -> None:
        super().__init__()
        self._markdown = MarkdownLines()
        self._markdown.become(markdown)
        self._lines: list[Line] = []
        self._drawn: tuple[int, bool] | None = None  # the width and the theme that `_lines` are for

    @property
    def source(self) -> str:
        return self._markdown.source

    def become(self, markdown: str) -> bool:
        """Show this text; False where it does not go on from what is shown."""
        if markdown == self.source:
            return True
        if not self._markdown.become(markdown):
            return False
        before, self._drawn = self._lines, None
        width = self.content_size.width
        if not width:
            self.refresh(layout=True)
            return True
        now = self._lines_at(width)
        if len(now) != len(before):
            self.refresh(layout=True)
        else:
            changed = next((y for y, line in enumerate(now) if line != before[y]), len(now))
            self.refresh(Region(0, changed, width, len(now) - changed))
        return True

    def _lines_at(self, width: int) -> list[Line]:
        look = width, self.app.current_theme.dark
        if self._drawn != look:
            self._lines, self._drawn = self._markdown.lines(width, dark=look[1]), look
        return self._lines

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines_at(width))

    def notify_style_update(self) -> None:
        """Another theme, perhaps: code has colours of its own in each."""
        if self._drawn is not None and self._drawn[1] != self.app.current_theme.dark:
            self.refresh(layout=True)
        super().notify_style_update()

    def render(self) -> RenderResult:
        return ""  # lines are asked for one by one

    def render_line(self, y: int) -> Strip:
        width, plain = self.content_size.width, self.rich_style
        lines = self._lines_at(width) if width else []
        if y >= len(lines):
            return Strip.blank(width, plain)
        strip = Strip(lines[y]).apply_style(plain)
        selection = self.text_selection
        span = selection.get_span(y) if selection is not None else None
        if span is not None:
            strip = _lit(strip, span, self)
        return strip.adjust_cell_length(width, plain).apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """What is copied of it: the lines as they are shown."""
        shown = ("".join(segment.text for segment in line).rstrip() for line in self._lines)
        return selection.extract("\n".join(shown)), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        self.refresh()


def _lit(strip: Strip, span: tuple[int, int], widget: Widget) -> Strip:
    """The strip with the cells from span[0] to span[1] (-1: its end) shown as selected."""
    start, end = span[0], strip.cell_length if span[1] == -1 else span[1]
    style = widget.screen.get_component_rich_style("screen--selection")
    before, inside, after = strip.divide([start, end, max(end, strip.cell_length)])
    return Strip.join([before, inside.apply_style(style), after])

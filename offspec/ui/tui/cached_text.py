"""Text widget with cheap updates: painted only if the text changes, laid out only if its size changes."""

from rich.cells import cell_len
from textual.content import Content
from textual.widgets import Static

from offspec.ui.printable import printable


class CachedText(Static):
    """Text that rarely changes its size.

    Args:
        text: Initial text.
        id: Id for styles and queries.
        by_width: Whether the layout depends on the widths of the lines, not just on their number.
    """

    def __init__(self, text: str = "", *, id: str | None = None, by_width: bool = False) -> None:
        self._shown = Content(printable(text))
        self._by_width = by_width
        super().__init__(self._shown, id=id, markup=False)

    def show(self, text: Content | str) -> None:
        """Show this text."""
        before, self._shown = self._shown, Content(printable(text)) if isinstance(text, str) else text
        if self._shown.plain != before.plain:
            self.update(self._shown, layout=self._measure(self._shown) != self._measure(before))

    def _measure(self, content: Content) -> list[int] | int:
        """Return the size relevant to the layout: widths of the lines in cells, or their number."""
        lines = content.plain.split("\n") if content else []
        return [cell_len(line) for line in lines] if self._by_width else len(lines)

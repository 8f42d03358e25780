"""Text whose changes cost little: it is painted only if it changes, and laid out only if its size does."""

from rich.cells import cell_len
from textual.content import Content
from textual.widgets import Static

from offspec.ui.printable import printable


class SteadyText(Static):
    """Text that says the same for a while, or something as long.

    Args:
        text: Shown first.
        id: For styles and queries.
        by_width: The layout depends on the widths of the lines, and not on their number alone.
    """

    def __init__(self, text: str = "", *, id: str | None = None, by_width: bool = False) -> None:
        self._shown = Content(printable(text))
        self._by_width = by_width
        super().__init__(self._shown, id=id, markup=False)

    def show(self, text: Content | str) -> None:
        """Show this from now on."""
        before, self._shown = self._shown, Content(printable(text)) if isinstance(text, str) else text
        if self._shown.plain != before.plain:
            self.update(self._shown, layout=self._measure(self._shown) != self._measure(before))

    def _measure(self, content: Content) -> list[int] | int:
        """What the layout depends on: the widths of the lines in cells, or their number."""
        lines = content.plain.split("\n") if content else []
        return [cell_len(line) for line in lines] if self._by_width else len(lines)

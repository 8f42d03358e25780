"""rich's console, through which nothing passes that a terminal would obey and that rich did not make."""

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from offspec.ui.printable import printable, without_controls


class Console(RichConsole):
    """Text that was not made `printable` before loses its control characters."""

    def print_line(self, text: str, style: str = "") -> None:
        """Print a line, which stays one in a log. Brackets are no markup: a file name may hold some."""
        self.print(Text(printable(text), style=style), soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; those that are controls come from rich itself."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)

"""rich's console without the control characters that rich did not produce itself."""

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from offspec.ui.printable import printable, without_controls


class Console(RichConsole):
    """Console that removes control characters from text that was not made `printable` before."""

    def print_line(self, text: str, style: str = "") -> None:
        """Print a line without wrapping. Brackets are not markup, since file names may contain them."""
        self.print(Text(printable(text), style=style), soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of a renderable. Control segments come from rich itself and are kept."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)

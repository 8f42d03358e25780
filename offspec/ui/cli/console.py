"""rich's console, through which nothing passes that a terminal would obey and that rich did not make."""

from collections.abc import Iterable

from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from offspec.ui.printable import without_controls


class Console(RichConsole):
    """Text that was not made `printable` before loses its control characters."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable; those that are controls come from rich itself."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else without_controls(text), style, control)

"""Small apps around one widget or one screen."""

from textual.app import App, ComposeResult

from offspec.ui.tui import themes
from offspec.ui.tui.markdown import StreamedMarkdown


class ScreenHost(App[None]):
    """An app with the program's themes, and the value that a screen is dismissed with."""

    got: object = "nothing yet"

    def on_mount(self) -> None:
        themes.register(self)


class MarkdownPage(App[None]):
    """An app that shows Markdown."""

    def __init__(self, prose: StreamedMarkdown) -> None:
        super().__init__()
        self.prose = prose

    def compose(self) -> ComposeResult:
        yield self.prose

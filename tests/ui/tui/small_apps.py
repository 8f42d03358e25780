"""Small apps around one widget or one screen."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from textual.app import App, ComposeResult
from textual.pilot import Pilot
from textual.screen import Screen

from offspec.ui.tui import themes
from offspec.ui.tui.markdown import StreamedMarkdown


class ScreenHost(App[None]):
    """An app with the program's themes, and the value returned by a screen."""

    got: object = "nothing yet"

    def on_mount(self) -> None:
        themes.register(self)

    async def show(self, screen: Screen[Any]) -> None:
        await self.push_screen(screen, lambda got: setattr(self, "got", got))


@asynccontextmanager
async def showing(
    screen: Screen[Any], size: tuple[int, int] = (80, 24)
) -> AsyncIterator[tuple[Pilot[None], ScreenHost]]:
    """An app that shows this screen, with all data loaded by threads."""
    app = ScreenHost()
    app.animation_level = "none"
    async with app.run_test(size=size) as pilot:
        await app.show(screen)
        await threads_done(pilot)
        yield pilot, app


async def threads_done(pilot: Pilot[None]) -> None:
    """Wait until data loaded by threads is shown."""
    await pilot.app.workers.wait_for_complete([w for w in pilot.app.workers if w._thread_worker])
    await pilot.pause()


class MarkdownPage(App[None]):
    """An app that shows Markdown."""

    def __init__(self, prose: StreamedMarkdown) -> None:
        super().__init__()
        self.prose = prose

    def compose(self) -> ComposeResult:
        yield self.prose

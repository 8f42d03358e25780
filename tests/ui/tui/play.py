"""Scenes with the whole app: a coroutine drives it as a user would, over a scripted engine."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from textual.pilot import Pilot

from offspec.ui.tui.app import ChatApp

Scene = Callable[["Pilot[None]"], Coroutine[Any, Any, None]]


def play(app: ChatApp, scene: Scene, size: tuple[int, int] = (100, 30)) -> ChatApp:
    """Run the scene, and leave the app as a user does who closes it."""

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            await scene(pilot)
            app.exit()

    asyncio.run(run())
    assert app.engine is not None
    assert app.engine.close(5.0)
    return app


async def send(pilot: Pilot[None], text: str) -> None:
    """Write into the composer, and press Enter."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    app.composer.set_text(text)
    await pilot.press("enter")


def seen(app: ChatApp) -> str:
    """What the terminal shows, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


def said(app: ChatApp) -> list[tuple[str, str]]:
    """Everything in the transcript: its kind and its text."""
    kinds = {True: "question", False: "answer"}
    return [(entry.kind or kinds[entry.is_question], entry.text) for entry in app.transcript.entries]

"""Ctrl+P: our own commands and themes, and nothing of Textual's."""

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from offspec.ui.chat.commands import COMMANDS
from offspec.ui.tui.app import ChatApp
from tests.ui.tui.stage import loaded, plays, said, settled, until


@plays("ok")
async def test_the_palette_lists_our_own(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    listed = {command.title: command for command in app.get_system_commands(app.screen)}
    assert list(listed) == [*(f"/{name}" for name in COMMANDS), "dark theme", "light theme"]
    listed["/load"].callback()
    assert app.composer.text == "/load "
    listed["light theme"].callback()
    assert app.theme == "offspec-light"


@plays("ok")
async def test_a_command_of_the_palette_runs(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("ctrl+p")
    await until(pilot, lambda: CommandPalette.is_open(app))
    await pilot.press(*"/retry")
    await settled(pilot)
    await pilot.press("enter", "enter")
    await until(pilot, lambda: bool(said(app)))
    assert said(app) == [("error", "nothing has been asked yet")]
    await pilot.press("f1", "ctrl+p")
    await pilot.pause()
    assert not CommandPalette.is_open(app)


@plays("ok")
async def test_a_theme_that_is_none_is_told(pilot: Pilot[None], app: ChatApp) -> None:
    await until(pilot, lambda: bool(said(app)))
    assert said(app) == [
        ("notice", "there is no theme 'pink', as OFFSPEC_THEME has it; there are dark and light")
    ]


@pytest.fixture(autouse=True)
def pink(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "theme_that_is_none" in request.node.name:
        monkeypatch.setenv("OFFSPEC_THEME", "pink")
    else:
        monkeypatch.delenv("OFFSPEC_THEME", raising=False)

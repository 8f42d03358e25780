"""Ctrl+P: our own commands and themes, and nothing of Textual's."""

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from offspec.core.user_config import UserConfig
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.tui.app import ChatApp
from tests.ui.tui.stage import loaded, plays, said, seen, settled, until


@plays("ok")
async def test_the_palette_lists_our_own(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    listed = {command.title: command for command in app.get_system_commands(app.screen)}
    assert list(listed) == [*(f"/{name}" for name in COMMANDS), "dark theme", "light theme"]
    listed["/load"].callback()
    assert app.composer.text == "/load "


@plays("ok")
async def test_the_theme_is_remembered(
    pilot: Pilot[None], app: ChatApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("OFFSPEC_THEME", "dark")  # is put back afterwards
    monkeypatch.delenv("OFFSPEC_THEME")
    await loaded(pilot)
    listed = {command.title: command for command in app.get_system_commands(app.screen)}
    for name in ("light", "dark", "light"):
        listed[f"{name} theme"].callback()
        await pilot.pause()
        assert app.theme == f"offspec-{name}" and f"the {name} theme is remembered in" in seen(app)
        assert UserConfig().values == {"theme": name}
    monkeypatch.setenv("OFFSPEC_THEME", "light")
    listed["dark theme"].callback()
    assert "remembered in" in seen(app)
    monkeypatch.setenv("OFFSPEC_THEME", "light")  # by the user, who has another default
    listed["dark theme"].callback()
    await pilot.pause()
    assert "OFFSPEC_THEME is set" in seen(app)


@plays("ok")
async def test_a_theme_that_cannot_be_remembered_is_used_all_the_same(
    pilot: Pilot[None], app: ChatApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFSPEC_CONFIG", str(tmp_path))
    (tmp_path / "config.toml").write_text("[theme")
    await loaded(pilot)
    (light,) = (command for command in app.get_system_commands(app.screen) if command.title == "light theme")
    light.callback()
    await pilot.pause()
    assert app.theme == "offspec-light" and "the light theme is not remembered" in seen(app)
    assert (tmp_path / "config.toml").read_text() == "[theme"


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

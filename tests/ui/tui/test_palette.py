"""Ctrl+P: the palette has our commands and themes, and none of Textual's."""

from pathlib import Path

import pytest
from textual.command import CommandPalette
from textual.pilot import Pilot

from offspec.core.user_config import UserConfig
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.tui.app import ChatApp
from tests.ui.tui.stage import loaded, plays, said, seen, settled, until


@pytest.fixture(autouse=True)
def no_theme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_THEME", "dark")  # is restored afterwards
    monkeypatch.delenv("OFFSPEC_THEME")


@pytest.fixture
def pink(no_theme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_THEME", "pink")


@plays("ok")
async def test_palette_lists_and_runs_our_commands(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    listed = {command.title: command for command in app.get_system_commands(app.screen)}
    assert list(listed) == [*(f"/{name}" for name in COMMANDS), "dark theme", "light theme"]
    listed["/load"].callback()
    assert app.composer.text == "/load "
    app.composer.clear()
    await pilot.press("ctrl+p")
    await until(pilot, lambda: CommandPalette.is_open(app))
    await pilot.press(*"/retry")
    await settled(pilot)
    await pilot.press("enter", "enter")
    await until(pilot, lambda: bool(said(app)))
    assert said(app) == [("error", "the conversation is empty; ask a question first")]
    await pilot.press("f1", "ctrl+p")
    await pilot.pause()
    assert not CommandPalette.is_open(app)


@plays("ok")
async def test_theme_is_saved(
    pilot: Pilot[None], app: ChatApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "config"
    monkeypatch.setenv("OFFSPEC_CONFIG", str(folder))
    await loaded(pilot)
    listed = {command.title: command for command in app.get_system_commands(app.screen)}
    for name in ("light", "dark", "light"):
        listed[f"{name} theme"].callback()
        await pilot.pause()
        assert app.theme == f"offspec-{name}" and f"{name} theme saved in" in seen(app)
        assert UserConfig().values == {"theme": name}
    monkeypatch.setenv("OFFSPEC_THEME", "light")
    listed["dark theme"].callback()
    assert "theme saved in" in seen(app)
    monkeypatch.setenv("OFFSPEC_THEME", "light")  # by a user with another default
    listed["dark theme"].callback()
    await pilot.pause()
    assert "OFFSPEC_THEME is set" in seen(app)
    (folder / "config.toml").write_text("[theme")
    listed["light theme"].callback()
    await pilot.pause()
    assert app.theme == "offspec-light" and "the light theme could not be saved" in seen(app)
    assert (folder / "config.toml").read_text() == "[theme"


@plays("ok")
async def test_unknown_theme_is_reported(pilot: Pilot[None], app: ChatApp, pink: None) -> None:
    await until(pilot, lambda: bool(said(app)))
    assert said(app) == [("notice", "unknown theme 'pink' in OFFSPEC_THEME; valid themes are dark and light")]

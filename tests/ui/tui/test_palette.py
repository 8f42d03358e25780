"""Ctrl+P: our own commands and themes, and nothing of Textual's."""

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
    monkeypatch.setenv("OFFSPEC_THEME", "dark")  # is put back afterwards
    monkeypatch.delenv("OFFSPEC_THEME")


@pytest.fixture
def pink(no_theme: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFSPEC_THEME", "pink")


@plays("ok")
async def test_the_palette_lists_and_runs_our_own(pilot: Pilot[None], app: ChatApp) -> None:
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
async def test_the_theme_is_remembered(
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
    monkeypatch.setenv("OFFSPEC_THEME", "light")  # by the user, who has another default
    listed["dark theme"].callback()
    await pilot.pause()
    assert "OFFSPEC_THEME is set" in seen(app)
    (folder / "config.toml").write_text("[theme")
    listed["light theme"].callback()
    await pilot.pause()
    assert app.theme == "offspec-light" and "the light theme could not be saved" in seen(app)
    assert (folder / "config.toml").read_text() == "[theme"


@plays("ok")
async def test_a_theme_that_is_none_is_told(pilot: Pilot[None], app: ChatApp, pink: None) -> None:
    await until(pilot, lambda: bool(said(app)))
    assert said(app) == [("notice", "unknown theme 'pink' in OFFSPEC_THEME; valid themes are dark and light")]

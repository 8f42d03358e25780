"""The list of completions: its rows, and the mouse."""

from pathlib import Path

from rich.cells import cell_len
from textual.pilot import Pilot

from offspec.ui.chat.controller import Completion
from offspec.ui.tui.completion import CompletionList, _row
from tests.ui.tui.stage import app_for, loaded, play, until


def test_a_click_takes_a_completion(tmp_path: Path) -> None:
    app, _ = app_for(["ok"], tmp_path)

    async def scene(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        await pilot.press("/", "s", "e")
        choices = app.query_one(CompletionList)
        offered = [choice.text for choice in choices.offered]
        await pilot.click(CompletionList, offset=(2, 1))
        await until(pilot, lambda: app.composer.text == offered[1])
        await pilot.press("x")
        assert app.composer.text == f"{offered[1]}x"

    play(app, scene)


def test_wide_names_do_not_push_the_help_away() -> None:
    rows = [_row(Completion(text, "help"), 10).plain for text in ("/load 世界", "/load ab")]
    assert {cell_len(row) for row in rows} == {10 + 2 + 4}

"""The list of completions: its rows, and the mouse."""

from rich.cells import cell_len
from textual.pilot import Pilot

from offspec.ui.chat.controller import Completion
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.completion import CompletionList, _row
from tests.ui.tui.stage import loaded, plays, until


@plays("ok")
async def test_a_click_takes_a_completion(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("/", "s", "e")
    choices = app.query_one(CompletionList)
    offered = [choice.text for choice in choices.offered]
    await pilot.click(CompletionList, offset=(2, 1))
    await until(pilot, lambda: app.composer.text == offered[1])
    await pilot.press("x")
    assert app.composer.text == f"{offered[1]}x"


def test_wide_names_do_not_push_the_help_away() -> None:
    rows = [_row(Completion(text, "help"), 10).plain for text in ("/load 世界", "/load ab")]
    assert {cell_len(row) for row in rows} == {10 + 2 + 4}

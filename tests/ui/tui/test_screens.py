"""Text pages, the help, and the themes."""

import pytest
from textual.app import App
from textual.binding import Binding

from offspec.ui.chat.commands import COMMANDS
from offspec.ui.tui import themes
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.markdown import StreamedMarkdown
from offspec.ui.tui.page_screen import KEYS, PageScreen, help_page, help_screen
from tests.ui.tui.small_apps import showing


async def test_open_and_close_a_page() -> None:
    page = PageScreen("The [plan]", "\n\n".join(f"Sentence {n}." for n in range(60)))
    async with showing(page) as (pilot, app):
        assert str(page.query_one("#page").border_title) == "The \\[plan]"
        await pilot.press("j", "down", "pagedown")
        await pilot.pause()
        assert page.query_one("#page").scroll_offset.y > 2
        for key in ("escape", "q", "enter", "ctrl+c"):
            await pilot.press(key)
            await pilot.pause()
            assert app.screen is not page, key
            page = PageScreen("Another", "Sentence.")
            await app.show(page)


async def test_ctrl_c_copies_the_selection_of_a_page() -> None:
    page = PageScreen("Plan", "One line.")
    async with showing(page) as (pilot, app):
        assert page.query_one("#page").size.height < 8  # a short page takes only the space that it needs
        page.query_one(StreamedMarkdown).text_select_all()
        await pilot.press("ctrl+c")
        await pilot.pause()
        assert app.clipboard.strip() == "One line."
        assert app.screen is page


async def test_table_cells_are_not_markup_under_the_mouse() -> None:
    page = PageScreen("Figures", "| a |\n|---|\n| [/path] |\n")
    async with showing(page) as (pilot, app):
        prose = page.query_one(StreamedMarkdown)
        assert "[/path]" in "".join(prose.render_line(y).text for y in range(prose.size.height))
        await pilot.hover(StreamedMarkdown, offset=(4, 2))
        await pilot.pause(app.TOOLTIP_DELAY + 0.1)
        assert app.screen is page


def test_help_names_every_command_and_key() -> None:
    for command in COMMANDS.values():
        assert f"`{command.usage}`".replace("|", "\\|") in help_page()
    listed = " ".join(key for key, _ in KEYS).lower().replace("+", "").replace("esc", "escape")
    for binding in ChatApp.BINDINGS:
        assert isinstance(binding, Binding)
        for key in binding.key.split(","):
            assert key.replace("+", "") in listed, f"the help does not know {key}"


async def test_help_scrolls_in_a_small_terminal() -> None:
    async with showing(help_screen(), size=(40, 12)) as (pilot, app):
        await pilot.press("end")
        await pilot.pause()
        assert app.screen.query_one("#page").scroll_offset.y > 10


@pytest.mark.parametrize(
    ("variables", "light"),
    [
        ({}, False),
        ({"OFFSPEC_THEME": "light"}, True),
        ({"OFFSPEC_THEME": " Dark ", "COLORFGBG": "0;15"}, False),
        ({"COLORFGBG": "0;15"}, True),
        ({"COLORFGBG": "0;default;7"}, True),
        ({"COLORFGBG": "15;0"}, False),
        ({"OFFSPEC_THEME": "purple", "COLORFGBG": "0;15"}, True),
    ],
)
def test_theme_follows_the_terminal(variables: dict[str, str], light: bool) -> None:
    app: App[None] = App()
    wrong = themes.register(app, variables)
    assert (
        ("'purple'" in wrong and "dark and light" in wrong) == ("purple" in variables.values()) == bool(wrong)
    )
    assert app.theme == ("offspec-light" if light else "offspec-dark")

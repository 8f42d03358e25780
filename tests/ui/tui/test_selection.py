"""Mouse selections are visible, with colours and without."""

import pytest
from rich.style import Style
from textual.app import App
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.selection import Selection

from offspec.ui.tui import themes
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.markdown import StreamedMarkdown
from tests.ui.tui.small_apps import MarkdownPage
from tests.ui.tui.stage import ask, plays

MARKDOWN = "α *β* `γ` line.\n\n```python\nδ = 1\n```\n\n世 π"
LETTERS = "αβγδ世π"  # plain, emphasized, inline code, code block, wide, after wide


def styles(app: App[None]) -> dict[str, Style]:
    """The style of each character on the screen."""
    strips = app.screen._compositor.render_strips()
    pieces = [(letter, piece.style) for strip in strips for piece in strip for letter in piece.text]
    return {letter: style or Style() for letter, style in pieces}


@pytest.mark.parametrize("theme", themes.THEMES)
async def test_selected_markdown_has_selection_colours(theme: str) -> None:
    page = MarkdownPage(StreamedMarkdown(MARKDOWN))
    async with page.run_test(size=(30, 12)) as pilot:
        themes.register(page, {"OFFSPEC_THEME": theme})
        await pilot.pause()
        before = styles(page)
        page.screen.text_select_all()
        await pilot.pause()
        assert page.screen.get_selected_text() == "α β γ line.\n\n δ = 1\n\n世 π"
        selected = page.screen.get_component_rich_style("screen--selection").bgcolor
        for letter in LETTERS:
            shown = styles(page)[letter]
            assert before[letter].bgcolor != shown.bgcolor == selected, letter
            assert shown.color == before["α"].color, letter


@pytest.fixture
def no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("no_colour")
@plays(MARKDOWN)
async def test_selection_is_visible_without_colour(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "ω?")
    assert not any(styles(app)[letter].reverse for letter in LETTERS + "ω")
    app.screen.text_select_all()
    await pilot.pause()
    assert all(styles(app)[letter].reverse for letter in LETTERS + "ω")


async def test_selection_after_wide_characters() -> None:
    prose = StreamedMarkdown("世界 plain")
    page = MarkdownPage(prose)
    async with page.run_test(size=(30, 12)) as pilot:
        await pilot.pause()
        page.screen.selections = {prose: Selection(Offset(3, 0), Offset(5, 0))}
        await pilot.pause()
        shown = styles(page)
        assert (page.screen.get_selected_text() or "").strip() == "pl"
        marked = [letter for letter in "世界plain" if shown[letter].bgcolor != shown["世"].bgcolor]
        assert marked == ["p", "l"]

"""Keys of the tree screen."""

from collections import deque

import pytest
from textual.content import Content
from textual.widgets import Static

from offspec.core.events import TreeSeen
from offspec.ui.tui.tree_screen import TreeScreen, TreeView
from tests.ui.tui.small_apps import showing
from tests.ui.tui.trees import bush, chain, sentence


def caption_of(screen: TreeScreen) -> str:
    return str(screen.query_one("#tree-caption", Static).visual)


def rows(screen: TreeScreen) -> list[str]:
    view = screen.query_one(TreeView)
    return [view.render_line(y).text.rstrip() for y in range(view.size.height)]


async def test_keys_step_through_the_passes() -> None:
    screen = TreeScreen([sentence(), chain(5), bush(30)], -1)
    async with showing(screen) as (pilot, _):
        seen = [caption_of(screen).split(":")[0]]
        for key in ("right", "left", "home", "left", "end"):
            await pilot.press(key)
            seen.append(caption_of(screen).split(":")[0])
        assert seen == [f"pass {at} of 3" for at in (3, 3, 2, 1, 1, 3)]


async def test_space_unfolds_rejected_branches() -> None:
    screen = TreeScreen([sentence()], -1)
    async with showing(screen) as (pilot, _):
        assert any("▸ 2 more" in row for row in rows(screen))
        await pilot.press("space")
        assert not any("▸" in row for row in rows(screen))
        assert any("·scatters" in row for row in rows(screen))
        await pilot.press("space")
        assert any("▸ 2 more" in row for row in rows(screen))


async def test_large_tree_scrolls_and_paints_only_visible_lines() -> None:
    screen = TreeScreen([bush(1000)], -1)
    async with showing(screen) as (pilot, _):
        await pilot.press("space")
        view = screen.query_one(TreeView)
        painted = []
        paint = view.render_line

        def counted(y: int) -> object:
            painted.append(y)
            return paint(y)

        view.render_line = counted  # type: ignore[method-assign, assignment]
        await pilot.press("j", "down", "pagedown")
        await pilot.pause()
        assert view.scroll_offset.y == 2 + view.size.height - 1
        assert painted and max(painted) < view.size.height
        await pilot.press("k", "pageup", "up", "up")
        assert view.scroll_offset.y == 0


async def test_wide_trees_scroll_sideways() -> None:
    screen = TreeScreen([bush(1000)], -1)
    async with showing(screen, size=(20, 12)) as (pilot, _):
        await pilot.press("space", "l")
        await pilot.pause()
        assert screen.query_one(TreeView).scroll_offset.x == 8
        assert rows(screen)[0] == " 100%  ● root"
        await pilot.press("h", "h")
        await pilot.pause()
        assert screen.query_one(TreeView).scroll_offset.x == 0


async def test_new_passes_are_followed_only_from_the_last_one() -> None:
    trees = deque([chain(3), sentence()], maxlen=3)
    screen = TreeScreen(trees, -1)
    async with showing(screen) as (pilot, _):
        trees.append(chain(4))
        screen.show_new_trees()
        assert caption_of(screen).startswith("pass 3 of 3: 4 nodes")
        await pilot.press("left")
        trees.append(chain(6))  # and the first is dropped
        screen.show_new_trees()
        assert caption_of(screen).startswith("pass 1 of 3: 11 nodes")
        trees.append(chain(7))
        screen.show_new_trees()
        assert caption_of(screen).startswith("pass 1 of 3: 4 nodes")


async def test_empty_session_shows_a_message_and_then_the_first_pass() -> None:
    trees: deque[TreeSeen] = deque()
    screen = TreeScreen(trees, -1)
    async with showing(screen) as (pilot, _):
        assert "No tree yet" in caption_of(screen)
        await pilot.press("left", "right", "home", "end", "space", "j", "pagedown")
        assert "No tree yet" in caption_of(screen)
        trees.append(sentence())
        screen.show_new_trees()
        assert caption_of(screen).startswith("pass 1 of 1")


async def test_pass_of_equal_width_needs_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = deque([sentence()])
    screen = TreeScreen(trees, -1)
    async with showing(screen):
        laid_out: list[str | None] = []
        update = Static.update

        def noted(line: Static, content: Content, *, layout: bool = True) -> None:
            if layout:
                laid_out.append(line.id)
            update(line, content, layout=layout)

        monkeypatch.setattr(Static, "update", noted)
        trees.append(sentence())
        screen.show_new_trees()
        assert caption_of(screen).startswith("pass 2 of 2")
        assert laid_out == []
        trees.append(chain(5))
        screen.show_new_trees()
        assert laid_out == ["tree-caption"]


async def test_closing_keys_and_a_small_terminal() -> None:
    screen = TreeScreen([sentence()], 0)
    async with showing(screen, size=(40, 12)) as (pilot, app):
        assert screen.query_one(TreeView).size.height >= 3
        for key in ("escape", "ctrl+c"):
            await pilot.press(key)
            await pilot.pause()
            assert app.screen is not screen
            screen = TreeScreen([sentence()], 0)
            await app.show(screen)

"""Small terminals, resizing during an answer, and wide characters."""

import pytest
from rich.cells import cell_len
from textual.pilot import Pilot

from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.panel import SidePanel
from tests.support.fake_engine import PassGate
from tests.ui.tui.stage import PlannedEngine, ask, hold, loaded, plays, seen, send, until

LONG = " ".join(f"word{i}" for i in range(40))
SMALL = (40, 12)


@plays("世界你好 👩‍👩‍👧 🎉 " * 8 + "é end", size=SMALL)
async def test_small_terminal_shows_question_answer_and_statistics(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "你好 🎉?")
    lines = seen(app).split("\n")
    assert len(lines) == 12 and all(cell_len(line) <= 40 for line in lines)
    assert any("你好 🎉?" in line for line in lines)
    assert any("end" in line for line in lines)
    assert "%" in lines[-2]
    assert "Ask a question" in lines[-1]
    assert not app.query_one(SidePanel).display
    await pilot.press("ctrl+b")
    await pilot.pause()
    assert "100 columns" in seen(app)
    await pilot.press("/")
    await pilot.pause()
    assert "/help" in seen(app)


@plays("x", size=(120, 30))
async def test_side_panel_is_shown_if_there_is_room(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "Why?")
    panel = app.query_one(SidePanel)
    assert panel.display
    assert "tok/s" in seen(app)
    await pilot.press("ctrl+b")
    assert not panel.display
    await pilot.press("ctrl+b")
    assert panel.display


@plays("long " * 100 + "\n\n```\n" + "code " * 100 + "\n```", size=(200, 80))
async def test_text_is_at_most_100_columns_wide(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "why " * 100)
    await app.transcript.note("note " * 100, "notice")
    await pilot.pause()
    await send(pilot, "/help set")
    await pilot.pause()
    rows = [line[:160].rstrip() for line in seen(app).split("\n")[1:-2]]
    for word in ("why", "long", "code", "note", "set"):
        assert 92 < max(len(row) for row in rows if word in row) <= 103, word


@plays(LONG, passes=8)
async def test_resize_during_an_answer_keeps_the_end_in_view(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await hold(pilot, engine, "Count.")
    await until(pilot, lambda: "word31" in seen(app))
    for size in ((40, 12), (160, 50), (30, 9), (100, 30)):
        await pilot.resize_terminal(*size)
        await until(pilot, lambda: "word31" in seen(app))
        assert len(seen(app).split("\n")) == size[1]
    engine.gate.set()
    await until(pilot, lambda: app.answer is None and "word39" in seen(app))


@plays("\n\n".join(f"line{i}" for i in range(60)), passes=10)
async def test_scrolling_up_stops_following_until_the_end_is_reached(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    indicator = list[bool]()
    await loaded(pilot)
    monkeypatch.setattr(app.status, "set_more_below", indicator.append)
    await hold(pilot, engine, "Count.")
    await until(pilot, lambda: "line39" in seen(app))
    assert not any(indicator)  # while it follows the end
    monkeypatch.undo()
    for to_the_end in (lambda: pilot.press("ctrl+end"), lambda: pilot.click("#below")):
        await pilot.press("pageup", "pageup")
        await until(pilot, lambda: "more below" in seen(app))
        await to_the_end()
        await until(pilot, lambda: "line39" in seen(app) and "more below" not in seen(app))
    await pilot.press("pageup", "pageup")
    await until(pilot, lambda: "line39" not in seen(app))
    at = app.transcript.scroll_y
    assert "more below" in seen(app).split("\n")[-2]
    engine.gate.set()
    await until(pilot, lambda: app.answer is None)
    await pilot.pause(0.1)
    assert app.transcript.scroll_y == at and "more below" in seen(app)
    await pilot.press(*["pagedown"] * 8)
    await until(pilot, lambda: "line59" in seen(app) and "more below" not in seen(app))
    await app.transcript.note("and this is followed again", "notice")
    await until(pilot, lambda: "and this is followed again" in seen(app))


@plays("short", "\n\n".join(f"line{i}" for i in range(60)))
async def test_page_down_at_the_end_keeps_following(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await ask(pilot, "Why?")
    before = seen(app)
    await pilot.press("pagedown", "pageup", "pagedown")
    await pilot.pause()
    assert seen(app) == before  # content shorter than the view does not jump
    engine.gate = PassGate(10)
    await hold(pilot, engine, "Count.")
    await until(pilot, lambda: "line39" in seen(app))
    await pilot.press("pagedown")
    engine.gate.set()
    await until(pilot, lambda: app.answer is None and "line59" in seen(app))

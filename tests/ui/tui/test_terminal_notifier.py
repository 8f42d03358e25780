"""The window title, the bell, and desktop notifications."""

from collections.abc import Callable

import pytest
from textual import events
from textual.pilot import Pilot

from offspec.ui.tui.app import ChatApp
from tests.support.fake_engine import Script
from tests.ui.tui.stage import PlannedEngine, ask, hold, loaded, plays, send, until

BELL, TITLE, NOTICE = "\x07", "\x1b]2;", "\x1b]9;"


@pytest.fixture(autouse=True)
def no_answer_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is."""
    monkeypatch.setattr("offspec.ui.tui.terminal_notifier._LONG", 1e9)


@pytest.fixture
def any_answer_is_long(no_answer_is_long: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offspec.ui.tui.terminal_notifier._LONG", 0.0)


long_answers = pytest.mark.usefixtures("any_answer_is_long")


async def written(pilot: Pilot[None], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Codes written to the terminal from now on, by their first characters."""
    app, codes = await loaded(pilot), list[str]()
    monkeypatch.setattr(app._driver, "write", codes.append)
    monkeypatch.setattr(app, "bell", lambda: codes.append(BELL))  # silent without a terminal
    return lambda begun: [code for code in codes if code.startswith(begun)]


async def in_another_window(pilot: Pilot[None], engine: PlannedEngine) -> None:
    """Get an answer while another window has the focus."""
    app = pilot.app
    assert isinstance(app, ChatApp)
    engine.gate.clear()
    await hold(pilot, engine, "Why?")
    app.post_message(events.AppBlur())
    await pilot.pause()
    engine.gate.set()
    await until(pilot, lambda: app.answer is None)


@plays("Blue.", passes=0)
async def test_title_shows_the_conversation_and_new_answers(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = await written(pilot, monkeypatch)
    await hold(pilot, engine, "Why\tis it \x1b]2;blue?\nSay.")
    assert codes(TITLE)[-1] == "\x1b]2;⋯ Why is it ]2;blue? · offspec\x07"
    engine.gate.set()
    await until(pilot, lambda: app.answer is None)
    assert codes(TITLE)[-1] == "\x1b]2;Why is it ]2;blue? · offspec\x07"
    await send(pilot, "/save Colours")
    await send(pilot, "/clear")
    await pilot.pause()
    assert codes(TITLE)[-1] == "\x1b]2;a new conversation · offspec\x07"
    assert not codes(BELL) and not codes(NOTICE)  # it was short


@long_answers
@plays("Blue.", "Red.", "Green.", Script("Not quite, not quite", fail_after=1, pass_tokens=1), "word " * 40)
async def test_long_answer_rings_and_notifies(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = await written(pilot, monkeypatch)
    await ask(pilot, "Why?")
    assert codes(BELL) == [BELL] and not codes(NOTICE)
    await in_another_window(pilot, engine)
    assert codes(BELL) == [BELL, BELL] and codes(NOTICE) == ["\x1b]9;The answer is complete: Why?\x07"]
    app.post_message(events.AppFocus())
    await ask(pilot, "Then?")
    assert len(codes(BELL)) == 3 and len(codes(NOTICE)) == 1
    await in_another_window(pilot, engine)  # of an error
    assert len(codes(BELL)) == 4
    assert codes(NOTICE)[1:] == ["\x1b]9;The answer was ended by an error: Why?\x07"]
    engine.gate.clear()
    await hold(pilot, engine, "Count.")
    await pilot.press("escape")
    await until(pilot, lambda: app.answer is None)
    assert len(codes(BELL)) == 4  # the user stopped it, and knows


@long_answers
@plays("Blue.", notify=False)
async def test_notifications_can_be_disabled(
    pilot: Pilot[None], engine: PlannedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = await written(pilot, monkeypatch)
    await in_another_window(pilot, engine)
    assert codes(TITLE) and not codes(BELL) and not codes(NOTICE)

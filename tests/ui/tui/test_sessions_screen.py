"""Saved conversations: choosing, previewing, renaming, deleting."""

from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.errors import RequestError
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.sessions_screen import SessionsScreen
from tests.ui.tui.small_apps import showing, threads_done
from tests.ui.tui.stage import ask, plays, said, seen, until

TALL = (80, 30)
TITLES = ("Rivers in the sky", "[b]Holiday[/b] plans", "Why is the sky blue?")


def put(archive: SessionArchive, title: str, at: int, *messages: str, model: str = "demo") -> Path:
    """Save a conversation changed in this minute. messages: questions and answers in turn."""
    talk = Conversation(model=model, title=title, updated=f"2026-01-02T03:{at:02}:00Z")
    for place, text in enumerate(messages or ("Question?", "Answer.")):
        talk.messages.append(
            Message("assistant" if place % 2 else "user", text, finish="eos" * (place % 2) or None)
        )
    talk.write(archive.file_for(talk))
    return archive.file_for(talk)


@pytest.fixture
def archive(tmp_path: Path) -> SessionArchive:
    return SessionArchive(tmp_path)


@pytest.fixture
def files(archive: SessionArchive) -> list[Path]:
    """Three conversations, the latest first."""
    found = [
        put(archive, title, at, model="org/large" if at == 1 else "demo") for at, title in enumerate(TITLES)
    ]
    return found[::-1]


def listing(archive: SessionArchive) -> SessionsScreen:
    """A screen on which no change is allowed."""

    def refuse(*_: object) -> None:
        raise RequestError("this one [stays]")

    return SessionsScreen(archive, refuse, refuse)


def options(screen: SessionsScreen) -> list[str]:
    return [str(option.prompt) for option in screen.query_one(OptionList).options]


def note(screen: SessionsScreen) -> str:
    return str(screen.query_one("#sessions-note", Static).visual)


def preview(screen: SessionsScreen) -> str:
    return str(screen.query_one("#sessions-preview Static", Static).visual)


async def test_choose_a_conversation(archive: SessionArchive, files: list[Path]) -> None:
    async with showing(listing(archive), TALL) as (pilot, app):
        await pilot.press("down", "down", "up", "enter")
        await pilot.pause()
        assert app.got == files[1]
        screen = listing(archive)
        await app.show(screen)
        await threads_done(pilot)
        assert note(screen).startswith("3 of 3")
        await pilot.press(*"LARGE")  # models are searched too, and titles are not markup
        assert options(screen)[0].startswith("[b]Holiday[/b] plans\n")
        await pilot.press("ctrl+u", *"sky")
        assert [option.split("\n")[0] for option in options(screen)] == [TITLES[2], TITLES[0]]
        await pilot.press("space", *"riv")
        assert "1 question" in options(screen)[0]
        assert note(screen).startswith("1 of 3")
        await pilot.press("enter")
        await pilot.pause()
        assert app.got == files[2]


async def test_enter_without_a_match_and_keys_that_cancel(archive: SessionArchive) -> None:
    (archive.folder / "x.json").write_text("{}")
    screen = listing(archive)
    async with showing(screen, TALL) as (pilot, app):
        assert note(screen) == "No conversation is saved yet.   1 cannot be read"
        assert options(screen)[0].startswith("x.json\n")
        await pilot.press("enter", "down", "ctrl+r", "ctrl+d")
        assert app.screen is screen and preview(screen) == ""
        for key in ("escape", "ctrl+c"):
            await pilot.press(key)
            await pilot.pause()
            assert app.got is None, key
            app.got = "nothing yet"
            await app.show(listing(archive))


async def test_preview_shows_beginning_and_end(archive: SessionArchive) -> None:
    turns = [
        text
        for n in range(5)
        for text in (f"Question {n}\x1b[31m [b]?", f"<think>\nhm\n</think>\n\nAnswer {n}.")
    ]
    put(archive, "short", 1, "Why?", "word " * 200)
    put(archive, "long", 2, *turns)
    broken = put(archive, "broken", 3)
    screen = listing(archive)
    async with showing(screen, TALL) as (pilot, _):
        broken.write_text("{}")
        await pilot.press("down")
        await threads_done(pilot)
        shown = preview(screen).split("\n\n")
        assert shown[0] == "Question 0�[31m [b]?" and shown[1] == "Answer 0."
        assert shown[2] == "⋯ 4 more messages" and shown[-1] == "Answer 4." and len(shown) == 7
        await pilot.press("down")
        await threads_done(pilot)
        assert preview(screen).startswith("Why?\n\nword word") and preview(screen).endswith(" …")
        await pilot.press("up", "up")
        await threads_done(pilot)
        assert str(broken) in preview(screen)
        await pilot.press(*"nothing")
        await threads_done(pilot)
        assert preview(screen) == ""


async def test_low_terminal_has_no_preview(archive: SessionArchive, files: list[Path]) -> None:
    screen = listing(archive)
    async with showing(screen, (40, 12)):
        assert not screen.query_one("#sessions-preview").display
        assert screen.query_one(OptionList).size.height >= 3


async def test_refusals_are_shown(archive: SessionArchive, files: list[Path]) -> None:
    screen = listing(archive)
    async with showing(screen, TALL) as (pilot, _):
        await pilot.press("ctrl+r", "x", "enter")
        await pilot.pause()
        assert note(screen) == "error: this one [stays]"
        await pilot.press("down")
        await pilot.press("ctrl+d", "y")
        await pilot.pause()
        assert note(screen) == "error: this one [stays]" and len(options(screen)) == 3


@plays("ok", size=(100, 30))
async def test_rename_and_delete_a_conversation(pilot: Pilot[None], app: ChatApp) -> None:
    archive = app.archive
    other, third = put(archive, "Rivers", 1), put(archive, "Lakes", 0)
    await ask(pilot, "Why?")
    await app.action_command("/sessions")
    await threads_done(pilot)
    screen = app.screen
    assert isinstance(screen, SessionsScreen)

    await pilot.press("down", "ctrl+r")
    await until(pilot, lambda: bool(app.screen.query("NameScreen Input")))
    assert app.screen.query_one(Input).value == "Rivers"
    await pilot.press("escape")
    assert Conversation.read(other).title == "Rivers"
    await pilot.press("ctrl+r", *" and lakes", "enter")
    await threads_done(pilot)
    assert [option.split("\n")[0] for option in options(screen)] == ["Why?", "Rivers and lakes", "Lakes"]

    for key in ("n", "escape", "enter", "ctrl+c"):
        await pilot.press("ctrl+d")
        await pilot.pause()
        assert "Delete 'Rivers and lakes', 1 question? This cannot be undone." in " ".join(seen(app).split())
        await pilot.press(key)
        if key == "enter":
            await pilot.press("n")
        await pilot.pause()
        assert app.screen is screen and other.exists()
    await pilot.press("ctrl+d", "y")
    await threads_done(pilot)
    assert [option.split("\n")[0] for option in options(screen)] == ["Why?", "Lakes"] and not other.exists()
    assert preview(screen).startswith("Question?")  # of the next one

    await pilot.press("up", "ctrl+d", "y")
    await threads_done(pilot)
    assert "this conversation is open here" in note(screen)
    await pilot.press("ctrl+r", "!", "enter")
    await threads_done(pilot)
    await pilot.press("escape")
    await pilot.pause()
    assert "Why?!" in seen(app).split("\n")[0] and third.exists()

    await app.action_command("/sessions")
    await threads_done(pilot)
    await pilot.press(
        *"lay", *["backspace"] * 3, *"lakes", "enter"
    )  # a letter of the filter does not confirm
    await until(pilot, lambda: said(app)[0] == ("question", "Question?"))
    assert len(archive.list()) == 2

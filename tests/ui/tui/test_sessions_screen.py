"""Saved conversations: chosen, looked at, renamed, deleted."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, OptionList, Static

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation, Message
from offspec.core.errors import RequestError
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.sessions_screen import SessionsScreen
from tests.ui.tui.small_apps import ScreenHost
from tests.ui.tui.stage import ask, loaded, plays, said, seen, until

TITLES = ("Rivers in the sky", "[b]Holiday[/b] plans", "Why is the sky blue?")


def put(archive: Archive, title: str, at: int, *messages: str, model: str = "demo") -> Path:
    """A conversation that changed in this minute. messages: questions and answers in turn."""
    talk = Conversation(model=model, title=title, updated=f"2026-01-02T03:{at:02}:00Z")
    for place, text in enumerate(messages or ("Question?", "Answer.")):
        talk.messages.append(
            Message("assistant" if place % 2 else "user", text, finish="eos" * (place % 2) or None)
        )
    talk.write(archive.file_for(talk))
    return archive.file_for(talk)


@pytest.fixture
def archive(tmp_path: Path) -> Archive:
    return Archive(tmp_path)


@pytest.fixture
def files(archive: Archive) -> list[Path]:
    """Three conversations, the latest first."""
    found = [
        put(archive, title, at, model="org/large" if at == 1 else "demo") for at, title in enumerate(TITLES)
    ]
    return found[::-1]


def refuse(*_: object) -> None:
    raise RequestError("this one [stays]")


@asynccontextmanager
async def listing(
    archive: Archive,
    rename: Callable[[Path, str], None] = refuse,
    delete: Callable[[Path], None] = refuse,
    size: tuple[int, int] = (80, 30),
) -> AsyncIterator[tuple[Pilot[None], ScreenHost, SessionsScreen]]:
    app, screen = ScreenHost(), SessionsScreen(archive, rename, delete)
    app.animation_level = "none"
    async with app.run_test(size=size) as pilot:
        await app.push_screen(screen, lambda got: setattr(app, "got", got))
        await settle(pilot)
        yield pilot, app, screen


async def settle(pilot: Pilot[None]) -> None:
    """What is read beside the interface is shown."""
    screen = next(screen for screen in pilot.app.screen_stack if isinstance(screen, SessionsScreen))
    await pilot.app.workers.wait_for_complete([w for w in pilot.app.workers if w._thread_worker])
    assert screen.is_attached
    await pilot.pause()


def options(screen: SessionsScreen) -> list[str]:
    return [str(option.prompt) for option in screen.query_one(OptionList).options]


def note(screen: SessionsScreen) -> str:
    return str(screen.query_one("#sessions-note", Static).visual)


def preview(screen: SessionsScreen) -> str:
    return str(screen.query_one("#sessions-preview Static", Static).visual)


async def test_a_conversation_is_chosen_with_the_arrows(archive: Archive, files: list[Path]) -> None:
    async with listing(archive) as (pilot, app, _):
        await pilot.press("down", "down", "up", "enter")
        await pilot.pause()
        assert app.got == files[1]


async def test_typing_narrows_the_list(archive: Archive, files: list[Path]) -> None:
    async with listing(archive) as (pilot, app, screen):
        assert note(screen).startswith("3 of 3")
        await pilot.press(*"sky")
        assert [option.split("\n")[0] for option in options(screen)] == [TITLES[2], TITLES[0]]
        await pilot.press("space", *"riv")
        assert "1 question" in options(screen)[0]
        assert note(screen).startswith("1 of 3")
        await pilot.press("enter")
        await pilot.pause()
        assert app.got == files[2]


async def test_titles_are_no_markup_and_models_are_searched_too(archive: Archive, files: list[Path]) -> None:
    async with listing(archive) as (pilot, _, screen):
        await pilot.press(*"LARGE")
        assert options(screen)[0].startswith("[b]Holiday[/b] plans\n")


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_enter_on_nothing_stays_and_these_leave_without_a_choice(key: str, archive: Archive) -> None:
    (archive.folder / "x.json").write_text("{}")
    async with listing(archive) as (pilot, app, screen):
        assert note(screen) == "No conversation is saved yet.   1 cannot be read"
        assert options(screen)[0].startswith("x.json\n")
        await pilot.press("enter", "down", "ctrl+r", "ctrl+d")
        assert app.screen is screen and preview(screen) == ""
        await pilot.press(key)
        await pilot.pause()
        assert app.got is None


async def test_the_chosen_one_is_shown_from_its_beginning_and_end(archive: Archive) -> None:
    turns = [
        text
        for n in range(5)
        for text in (f"Question {n}\x1b[31m [b]?", f"<think>\nhm\n</think>\n\nAnswer {n}.")
    ]
    put(archive, "short", 1, "Why?", "word " * 200)
    put(archive, "long", 2, *turns)
    broken = put(archive, "broken", 3)
    async with listing(archive) as (pilot, _, screen):
        broken.write_text("{}")
        await pilot.press("down")
        await settle(pilot)
        shown = preview(screen).split("\n\n")
        assert shown[0] == "Question 0�[31m [b]?" and shown[1] == "Answer 0."
        assert shown[2] == "⋯ 4 more messages" and shown[-1] == "Answer 4." and len(shown) == 7
        await pilot.press("down")
        await settle(pilot)
        assert preview(screen).startswith("Why?\n\nword word") and preview(screen).endswith(" …")
        await pilot.press("up", "up")
        await settle(pilot)
        assert str(broken) in preview(screen)
        await pilot.press(*"nothing")
        await settle(pilot)
        assert preview(screen) == ""


async def test_a_low_terminal_has_no_room_for_a_preview(archive: Archive, files: list[Path]) -> None:
    async with listing(archive, size=(40, 12)) as (_, _, screen):
        assert not screen.query_one("#sessions-preview").display
        assert screen.query_one(OptionList).size.height >= 3


async def test_what_is_refused_is_said(archive: Archive, files: list[Path]) -> None:
    async with listing(archive) as (pilot, _, screen):
        await pilot.press("ctrl+r", "x", "enter")
        await pilot.pause()
        assert note(screen) == "error: this one [stays]"
        await pilot.press("down")
        await pilot.press("ctrl+d", "y")
        await pilot.pause()
        assert note(screen) == "error: this one [stays]" and len(options(screen)) == 3


@plays("ok")
async def test_a_conversation_is_renamed_and_deleted(pilot: Pilot[None], app: ChatApp) -> None:
    archive = app.archive
    other, third = put(archive, "Rivers", 1), put(archive, "Lakes", 0)
    await ask(pilot, "Why?")
    await app.action_command("/sessions")
    await settle(pilot)
    screen = app.screen
    assert isinstance(screen, SessionsScreen)

    await pilot.press("down", "ctrl+r")
    await until(pilot, lambda: bool(app.screen.query("NameScreen Input")))
    assert app.screen.query_one(Input).value == "Rivers"
    await pilot.press("escape")
    assert Conversation.read(other).title == "Rivers"
    await pilot.press("ctrl+r", *" and lakes", "enter")
    await settle(pilot)
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
    await settle(pilot)
    assert [option.split("\n")[0] for option in options(screen)] == ["Why?", "Lakes"] and not other.exists()
    assert preview(screen).startswith("Question?")  # of the next one

    await pilot.press("up", "ctrl+d", "y")
    await settle(pilot)
    assert "this conversation is open here" in note(screen)
    await pilot.press("ctrl+r", "!", "enter")
    await settle(pilot)
    await pilot.press("escape")
    await pilot.pause()
    assert "Why?!" in seen(app).split("\n")[0] and third.exists()


@plays("ok")
async def test_a_letter_of_the_filter_is_not_a_yes(pilot: Pilot[None], app: ChatApp) -> None:
    put(app.archive, "My holiday", 1)
    await loaded(pilot)
    await app.action_command("/sessions")
    await settle(pilot)
    await pilot.press(*"my", "enter")
    await until(pilot, lambda: len(said(app)) == 3)
    assert len(app.archive.list()) == 1

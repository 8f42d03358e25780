"""Writing: lines, recall, completion, paste."""

from pathlib import Path

import pytest
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.pilot import Pilot
from textual.widgets.text_area import Edit, EditResult

from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.completion import CompletionList
from tests.ui.tui.stage import PlannedEngine, app_for, ask, loaded, play, plays, said, seen, send, until


@plays("ok")
async def test_enter_sends_and_other_keys_begin_a_line(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await loaded(pilot)
    await pilot.press("a", "shift+enter", "b", "ctrl+j", "c")
    assert app.composer.text == "a\nb\nc"
    assert app.composer.size.height == 3
    await pilot.press("enter")
    await until(pilot, lambda: bool(engine.asked) and app.answer is None)
    assert said(app)[0] == ("question", "a\nb\nc")
    assert app.composer.text == ""


@plays("ok")
async def test_nothing_is_sent_of_nothing(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await send(pilot, "  \n ")
    await pilot.pause()
    assert said(app) == []


@plays("ok")
async def test_arrows_recall_and_bring_back_what_was_being_written(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "first", "second\nline")
    await pilot.press("n", "e", "w")
    for key, text in (
        ("up", "second\nline"),  # its last line has the cursor
        ("up", "second\nline"),
        ("up", "first"),
        ("up", "first"),
        ("down", "second\nline"),
        ("down", "new"),
        ("down", "new"),
    ):
        await pilot.press(key)
        assert app.composer.text == text, key


def test_questions_of_a_resumed_conversation_are_recalled(tmp_path: Path) -> None:
    app, _ = app_for(["ok"], tmp_path)

    async def first(pilot: Pilot[None]) -> None:
        await ask(pilot, "first")

    async def second(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        await send(pilot, "/load first")
        await until(pilot, lambda: len(said(later)) == 3)
        assert said(later)[:2] == [("question", "first"), ("answer", "ok")]
        await pilot.press("up")
        assert later.composer.text in ("first", "/load first")

    play(app, first)
    later, _ = app_for(["ok"], tmp_path)
    play(later, second)


@plays("ok")
async def test_commands_are_listed_and_completed(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("/", "s")
    assert "/stats" in seen(app)
    assert "/retry" not in seen(app)
    await pilot.press("t", "tab")
    assert app.composer.text == "/stats"
    await pilot.press("backspace", "backspace", "backspace", "backspace", "down", "down", "enter")
    assert app.composer.text == "/set "
    await pilot.press("escape")
    assert "Show or change how answers are chosen" not in seen(app)
    await pilot.press("t", "e", "m", "tab")
    assert app.composer.text == "/set temperature="


@plays("ok")
async def test_a_slash_in_a_question_is_no_command(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    questions = ["/usr/bin is what?", "//help means what?", "//TODO fix", " /etc is what?"]
    await ask(pilot, *questions)
    assert len(engine.asked) == 4
    assert app.controller is not None
    asked = [message.content for message in app.controller.session.messages if message.role == "user"]
    assert asked == ["/usr/bin is what?", "/help means what?", "//TODO fix", " /etc is what?"]
    assert said(app)[2] == ("question", "/help means what?")


def test_a_question_that_looks_like_a_command_comes_back_so_that_it_is_asked(tmp_path: Path) -> None:
    app, engine = app_for(["ok"], tmp_path, passes=1)
    later, _ = app_for(["ok"], tmp_path)

    async def waits(pilot: Pilot[None]) -> None:
        await ask(pilot, "//quit now")
        await send(pilot, "first")
        await until(pilot, engine.held.is_set)
        await send(pilot, "//clear it")
        await send(pilot, "//help it")
        await pilot.press("escape")
        await until(pilot, lambda: app.answer is None)
        assert app.composer.text == "//clear it\n/help it"

    async def resumed(pilot: Pilot[None]) -> None:
        await loaded(pilot)
        await send(pilot, "/load /quit now")
        await until(pilot, lambda: ("question", "/quit now") in said(later))
        await send(pilot, "/undo")
        await pilot.pause()
        await send(pilot, "/edit")
        await until(pilot, lambda: bool(later.composer.text))
        assert later.composer.text == "/edit //quit now"

    play(app, waits)
    play(later, resumed)


@plays("ok")
async def test_fifty_thousand_characters_are_pasted_whole_and_shown_folded(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    engine.context = 100_000
    text = "\r\n".join(f"line {i} of a paste" for i in range(2500))
    assert len(text) > 50_000

    await loaded(pilot)
    app.post_message(events.Paste(text))
    await until(pilot, lambda: bool(app.composer.text))
    assert app.composer.size.height <= 12
    await pilot.press("!", "enter")
    await until(pilot, lambda: app.controller is not None and len(app.controller.session.messages) == 2)
    whole = text.replace("\r\n", "\n") + "!"
    assert app.controller is not None
    assert app.controller.session.messages[0].content == whole
    await until(pilot, lambda: app.answer is None)
    assert "line 0 of a paste" in seen(app)
    assert "line 2499" not in seen(app)
    assert f"2,500 lines, {len(whole):,} characters" in seen(app)
    await pilot.press("f2")
    await pilot.pause()
    assert "line 2499 of a paste!" in seen(app)


@plays("ok")
async def test_enter_does_not_overtake_what_was_written_before_it(pilot: Pilot[None], app: ChatApp) -> None:
    """A terminal may hand over a whole line at once."""

    await loaded(pilot)
    for letter in "all of it":
        app.post_message(events.Key("space" if letter == " " else letter, letter))
    app.post_message(events.Key("enter", "\r"))
    await until(pilot, lambda: bool(said(app)))
    assert said(app)[0] == ("question", "all of it")


@plays("ok")
async def test_a_key_empties_the_input_and_another_brings_it_back(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("a", "shift+enter", "b", "left", "ctrl+u")
    assert app.composer.text == ""
    await pilot.press("ctrl+underscore")
    assert app.composer.text == "a\nb"
    await pilot.press("ctrl+z")  # suspends, where there is a terminal
    assert app.composer.text == "a\nb"
    await pilot.press("ctrl+u", "/", "h")
    await pilot.press("ctrl+u")
    assert app.composer.text == "" and not app.query_one(CompletionList).shown


@plays("ok")
async def test_letters_that_come_together_are_put_in_together(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a terminal without bracketed paste: the same text as key by key, with few edits."""
    await loaded(pilot)
    edits, usual = [], app.composer.edit

    def edit(change: Edit) -> EditResult:
        edits.append(change.text)
        return usual(change)

    monkeypatch.setattr(app.composer, "edit", edit)
    line = "some words (é, 日本) " * 50
    for _ in range(3):
        for letter in line:
            app.post_message(events.Key(character_to_key(letter), letter))
        app.post_message(events.Key("ctrl+j", None))
        app.post_message(events.Paste("[pasted]"))
    wanted = (line + "\n[pasted]") * 3
    await until(pilot, lambda: len(app.composer.text) >= len(wanted))
    assert app.composer.text == wanted
    assert len(edits) < len(wanted) / 10

"""The composer: lines, history, completion and paste."""

import pytest
from rich.cells import cell_len
from textual import events
from textual.keys import _character_to_key as character_to_key
from textual.pilot import Pilot
from textual.widgets.text_area import Edit, EditResult

from offspec.ui.chat.completion import Completion
from offspec.ui.tui.app import ChatApp
from offspec.ui.tui.completion import CompletionList
from tests.ui.tui.stage import PlannedEngine, ask, hold, loaded, plays, said, seen, send, until


@plays("ok")
async def test_enter_sends_and_modified_enter_inserts_a_line(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await loaded(pilot)
    await send(pilot, "  \n ")
    await pilot.press("ctrl+u")
    assert said(app) == []  # an empty text is not sent
    await pilot.press("a", "shift+enter", "b", "ctrl+j", "c")
    assert app.composer.text == "a\nb\nc"
    assert app.composer.size.height == 3
    await pilot.press("enter")
    await until(pilot, lambda: bool(engine.requests) and app.answer is None)
    assert said(app)[0] == ("question", "a\nb\nc")
    assert app.composer.text == ""
    # A terminal may send a whole line at once: Enter must not overtake the text before it.
    for letter in "all of it":
        app.post_message(events.Key("space" if letter == " " else letter, letter))
    app.post_message(events.Key("enter", "\r"))
    await until(pilot, lambda: len(said(app)) > 2)
    assert said(app)[2] == ("question", "all of it")


@plays("ok")
async def test_arrows_recall_history_and_restore_the_draft(pilot: Pilot[None], app: ChatApp) -> None:
    await ask(pilot, "first", "second\nline")
    await pilot.press("n", "e", "w")
    for key, text in (
        ("up", "second\nline"),  # the cursor is in its last line
        ("up", "second\nline"),
        ("up", "first"),
        ("up", "first"),
        ("down", "second\nline"),
        ("down", "new"),
        ("down", "new"),
    ):
        await pilot.press(key)
        assert app.composer.text == text, key


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
async def test_slash_in_a_question_is_not_a_command(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    await ask(pilot, "/usr/bin is what?", "//help means what?", "//TODO fix", " /etc is what?")
    assert len(engine.requests) == 4
    questions = ["/usr/bin is what?", "/help means what?", "//TODO fix", " /etc is what?"]
    assert [text for kind, text in said(app) if kind == "question"] == questions
    engine.gate.clear()
    await hold(pilot, engine, "first")
    for question in ("//clear it", "//help it"):
        await send(pilot, question)
    await pilot.press("escape")
    await until(pilot, lambda: app.answer is None)
    assert app.composer.text == "//clear it\n/help it"  # so that it is questions, not run


@plays("ok")
async def test_large_paste_is_complete_and_folded(
    pilot: Pilot[None], app: ChatApp, engine: PlannedEngine
) -> None:
    engine.context = 100_000
    text = "\r\n".join(f"line {i} of a paste" for i in range(1200))

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
    assert "line 1199" not in seen(app)
    assert f"1,200 lines, {len(whole):,} characters" in seen(app)
    await pilot.press("f2")
    await pilot.pause()
    assert "line 1199 of a paste!" in seen(app)


@plays("ok")
async def test_clear_and_undo_the_input(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("a", "shift+enter", "b", "left", "ctrl+u")
    assert app.composer.text == ""
    await pilot.press("ctrl+underscore")
    assert app.composer.text == "a\nb"
    await pilot.press("ctrl+z")  # suspends in a real terminal
    assert app.composer.text == "a\nb"
    await pilot.press("ctrl+u", "/", "h")
    await pilot.press("ctrl+u")
    assert app.composer.text == "" and not app.query_one(CompletionList).display


@plays("ok")
async def test_click_on_a_completion_and_wide_names(pilot: Pilot[None], app: ChatApp) -> None:
    await loaded(pilot)
    await pilot.press("/", "s", "e")
    choices = app.query_one(CompletionList)
    offered = [choice.text for choice in choices.offered]
    await pilot.click(CompletionList, offset=(2, 1))
    await until(pilot, lambda: app.composer.text == offered[1])
    await pilot.press("x")
    assert app.composer.text == f"{offered[1]}x"
    choices.offer([Completion(name, "help") for name in ("/load 世界", "/load ab")])
    await pilot.pause()
    lines = [
        line.partition("help")[0] for line in seen(app).split("\n") if "help" in line and "/load" in line
    ]
    assert len(lines) == 2 and cell_len(lines[0]) == cell_len(lines[1])


@plays("ok")
async def test_letters_received_together_are_inserted_together(
    pilot: Pilot[None], app: ChatApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a terminal without bracketed paste: the text equals that of single keys, with few edits."""
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

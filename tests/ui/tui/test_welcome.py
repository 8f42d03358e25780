"""The first screen: loading and examples, or the resumed conversation."""

from dataclasses import replace
from pathlib import Path

from textual.pilot import Pilot

from offspec.chat.archive import SessionArchive
from offspec.core.config import EngineConfig
from offspec.ui.chat.welcome import startup_summary
from offspec.ui.tui.app import ChatApp
from tests.support.fake_engine import ScriptedLoad
from tests.ui.tui.stage import app_for, ask, loaded, play, plays, said, seen, send, until


def test_model_with_draft_and_limits() -> None:
    assert startup_summary(EngineConfig("demo")) == "demo, draft auto"
    config = EngineConfig("./big", draft="none", memory=1_300_000_000, vram=2 * 10**9, device="cuda")
    assert (
        startup_summary(config) == "./big, no draft, at most 1.30 GB of memory, at most 2.00 GB of GPU memory"
    )


@plays("ok", loads=False, draft="suffix", memory=1_300_000_000, size=(100, 40))
async def test_loading_and_examples(pilot: Pilot[None], app: ChatApp) -> None:
    assert isinstance(app.opener, ScriptedLoad)
    await until(pilot, lambda: "loading demo" in seen(app) and "limit 1.30 GB" in seen(app))
    for line in ("demo, draft suffix", "Ask a question", "/attach notes.txt", "/help"):
        assert line in seen(app)
    for line in ("trees by the plan", "a new conversation", "0 questions", "no data yet"):  # the side panel
        assert line in seen(app)
    await until(pilot, lambda: "reading" in "".join(line[66:] for line in seen(app).split("\n")))
    await send(pilot, "first")
    await pilot.press("escape")
    await until(pilot, lambda: "Ctrl+Q exits" in seen(app))
    assert app.composer.text == "first" and said(app) == []
    app.opener.gate.set()
    await loaded(pilot)
    assert "/attach notes.txt" in seen(app)  # until the first message
    await ask(pilot, "first")
    assert "/attach notes.txt" not in seen(app)
    await send(pilot, "/undo")
    await until(pilot, lambda: said(app) == [])
    assert "/attach notes.txt" in seen(app)


def test_resumed_conversation_is_shown_before_the_model_is_loaded(tmp_path: Path) -> None:
    first, _ = app_for(["grey sky", "blue sky"], tmp_path)

    async def talk(pilot: Pilot[None]) -> None:
        await ask(pilot, "What do you see?")
        await pilot.press("ctrl+r")
        await until(pilot, lambda: "← 2 of 2" in seen(first) and first.answer is None)

    play(first, talk)
    app, _ = app_for(["grass"], tmp_path, loads=False)
    app.setup = replace(app.setup, resume="")

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "blue sky" in seen(app) and "← 2 of 2" in seen(app))
        assert app.controller is None and "loading demo" in seen(app)
        await send(pilot, "And below?")
        shown = app.transcript.entries[0].widget
        assert isinstance(app.opener, ScriptedLoad)
        app.opener.gate.set()
        await until(pilot, lambda: app.answer is None and said(app)[-1] == ("answer", "grass"))
        assert app.transcript.entries[0].widget is shown  # it was not drawn a second time
        assert [kind for kind, _ in said(app)].count("notice") == 1
        texts = [text for kind, text in said(app) if kind != "notice"]
        assert texts == ["What do you see?", "blue sky", "And below?", "grass"]
        assert app.composer.recalled == ["What do you see?", "And below?"]

    play(app, scene)
    (entry,) = SessionArchive(tmp_path).list()
    assert entry.turns == 2

"""The first screen: what is loading and what to try, or the conversation that is resumed."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from offspec.chat.archive import Archive
from offspec.core.config import EngineConfig
from offspec.ui.chat.setup import Opener
from offspec.ui.chat.welcome import opening
from tests.support.waiting import PATIENCE
from tests.ui.tui.stage import app_for, ask, loaded, play, said, seen, send, until


def held(opener: Opener, gate: threading.Event) -> Callable[..., Any]:
    """Opens no model before the gate is open."""

    def load(*args: Any) -> Any:
        assert gate.wait(PATIENCE)
        return opener(*args)

    return load


def test_a_model_with_its_draft_and_limits() -> None:
    assert opening(EngineConfig("demo")) == "demo, draft auto"
    config = EngineConfig("./big", draft="none", memory=1_300_000_000, vram=2 * 10**9, device="cuda")
    assert opening(config) == "./big, no draft, at most 1.30 GB of memory, at most 2.00 GB of the GPU's"


def test_what_is_loading_and_what_to_try(tmp_path: Path) -> None:
    app, _ = app_for(["ok"], tmp_path)
    gate = threading.Event()
    app.opener = held(app.opener, gate)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "loading demo" in seen(app))
        for line in ("demo, draft auto", "Ask something", "/attach notes.txt", "/help"):
            assert line in seen(app)
        gate.set()
        await loaded(pilot)
        assert "/attach notes.txt" in seen(app)  # until something is said
        await ask(pilot, "first")
        assert "/attach notes.txt" not in seen(app)
        await send(pilot, "/undo")
        await until(pilot, lambda: said(app) == [])
        assert "/attach notes.txt" in seen(app)

    play(app, scene)


def test_what_is_resumed_is_shown_before_the_model_is_there(tmp_path: Path) -> None:
    first, _ = app_for(["blue sky"], tmp_path)

    async def talk(pilot: Pilot[None]) -> None:
        await ask(pilot, "What do you see?")

    play(first, talk)
    app, _ = app_for(["grass"], tmp_path)
    app.setup = replace(app.setup, resume="")
    gate = threading.Event()
    app.opener = held(app.opener, gate)

    async def scene(pilot: Pilot[None]) -> None:
        await until(pilot, lambda: "blue sky" in seen(app))
        assert app.controller is None and "loading demo" in seen(app)
        await send(pilot, "And below?")
        shown = app.transcript.entries[0].widget
        gate.set()
        await until(pilot, lambda: app.answer is None and said(app)[-1] == ("answer", "grass"))
        assert app.transcript.entries[0].widget is shown  # it was not drawn a second time
        assert [kind for kind, _ in said(app)].count("notice") == 1
        texts = [text for kind, text in said(app) if kind != "notice"]
        assert texts == ["What do you see?", "blue sky", "And below?", "grass"]
        assert app.composer.recalled == ["What do you see?", "And below?"]

    play(app, scene)
    (entry,) = Archive(tmp_path).list()
    assert entry.turns == 2

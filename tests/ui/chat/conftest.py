"""A chat over a scripted engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.ui.chat.controller import ChatController
from tests.support.fake_engine import ScriptedEngine
from tests.ui.chat.talk import ANSWER, SETUP


@pytest.fixture
def archive(tmp_path: Path) -> SessionArchive:
    return SessionArchive(tmp_path / "sessions")


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine([ANSWER])


@pytest.fixture
def chat(engine: ScriptedEngine, archive: SessionArchive) -> Iterator[ChatController]:
    chat = ChatController(engine, SETUP, archive)
    engine.notify = chat.on_event
    yield chat
    chat.close()
    assert engine.closed

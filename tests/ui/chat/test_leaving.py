"""The line printed when a chat ends, and the command in it."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.setup import restart_command
from tests.support.fake_engine import ScriptedEngine
from tests.ui.chat.talk import SETUP, say


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("chat demo", "chat demo"),
        ("chat --resume demo --memory 2GB", "chat demo --memory 2GB"),
        ("chat demo --session old --system=Be --draft none", "chat demo --draft none"),
        ("chat demo --system x --session=old", "chat demo"),
    ],
)
def test_command_of_a_chat_without_a_conversation(argv: str, words: str) -> None:
    assert restart_command(["/bin/offspec", *argv.split()]) == ("offspec", *words.split())


def test_resume_line_names_the_conversation(archive: SessionArchive, tmp_path: Path) -> None:
    setup = replace(SETUP, command=("offspec", "chat", "./a model"))
    chat = ChatController(ScriptedEngine(), setup, archive)
    assert chat.resume_command() == ""
    say(chat, "Why?")
    line = chat.resume_command().removeprefix("to continue: ")
    name = chat.session.conversation.id
    assert shlex.split(line) == ["offspec", "chat", "./a model", "--session", name]
    assert archive.find(name) == chat.file
    other = tmp_path / "elsewhere.json"
    chat.session.save(other)
    chat.load_conversation(other)
    assert chat.resume_command().endswith(f"--session {other}")
    chat.close()

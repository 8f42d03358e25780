"""Renaming and deleting saved conversations."""

from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.errors import OffspecError, RequestError, SessionError
from offspec.core.file_lock import Claim
from offspec.ui.chat.command_results import StreamAnswer
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.save_load import delete, rename
from tests.ui.chat.talk import said, say


@pytest.fixture
def earlier(chat: ChatController) -> Path:
    """A conversation with two versions of an answer, followed by another conversation."""
    say(chat, "Why?")
    outcome = run_command(chat, "/edit How?")
    assert isinstance(outcome, StreamAnswer)
    list(outcome.events)
    file = chat.file
    run_command(chat, "/clear")
    say(chat, "Where?")
    return file


def titles(archive: SessionArchive) -> list[str]:
    return sorted(entry.title for entry in archive.list())


def test_rename_changes_only_the_title(chat: ChatController, archive: SessionArchive, earlier: Path) -> None:
    before = Conversation.read(earlier)
    rename(chat, earlier, "  AC/DC\tlive ")
    after = Conversation.read(earlier)
    assert after.title == "AC/DC live" and before.branches
    before.title = after.title
    assert after == before and titles(archive) == ["AC/DC live", "Where?"]
    assert not list(archive.folder.glob(f".{earlier.name}*"))
    rename(chat, chat.file, "Here")
    say(chat, "And?")
    assert chat.session.conversation.title == "Here" and titles(archive) == ["AC/DC live", "Here"]


def test_refused_names(chat: ChatController, archive: SessionArchive, earlier: Path) -> None:
    for title, why in ((" \n", "needs a name"), ("where?", "another conversation is named 'where\\?'")):
        with pytest.raises(RequestError, match=why):
            rename(chat, earlier, title)
    assert titles(archive) == ["How?", "Where?"]
    rename(chat, earlier, "HOW?")
    assert titles(archive) == ["HOW?", "Where?"]


def test_delete_a_conversation(chat: ChatController, archive: SessionArchive, earlier: Path) -> None:
    delete(chat, earlier)
    assert titles(archive) == ["Where?"] and not earlier.exists()
    assert not list(archive.folder.glob(f".{earlier.name}*"))
    delete(chat, earlier)  # as another process may have done


def test_open_conversation_is_not_deleted(
    chat: ChatController, archive: SessionArchive, earlier: Path
) -> None:
    with pytest.raises(RequestError, match="is open here; begin a new one with /clear"):
        delete(chat, chat.file)
    claim = Claim(earlier)
    with pytest.raises(SessionError, match="open in another terminal"):
        delete(chat, earlier)
    with pytest.raises(SessionError, match="open in another terminal"):
        rename(chat, earlier, "Mine")
    claim.release()
    assert titles(archive) == ["How?", "Where?"] and said(chat)[0] == "Where?"


def test_read_only_folder(chat: ChatController, earlier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may write everywhere, so the error is simulated."""

    def refuse(file: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    with (
        monkeypatch.context() as patch,
        pytest.raises(OffspecError, match=r"cannot delete .*: Permission denied"),
    ):
        patch.setattr(Path, "unlink", refuse)
        delete(chat, earlier)
    assert earlier.exists()

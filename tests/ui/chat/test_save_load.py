"""`/save`, `/load`, and the start of a resumed chat."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation, Message
from offspec.core.errors import OffspecError, RequestError, SessionError
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.command_results import NewConversation
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from tests.support.fake_engine import ScriptedEngine
from tests.ui.chat.talk import ANSWER, SETUP, said, say, shown


def test_save_and_load_by_name(chat: ChatController, archive: SessionArchive) -> None:
    say(chat, "Why?")
    assert "**Holiday plans**" in shown(chat, "/save Holiday plans")
    assert isinstance(run_command(chat, "/clear"), NewConversation)
    assert said(chat) == []
    say(chat, "Other?")
    with pytest.raises(RequestError, match="another conversation is named 'Holiday plans'"):
        run_command(chat, "/save holiday PLANS")
    outcome = run_command(chat, "/load holiday plans")
    assert outcome == NewConversation("Resuming 'Holiday plans' (one question).")
    assert not chat.trees
    say(chat, "And?")
    assert {entry.title: entry.turns for entry in archive.list()} == {"Holiday plans": 2, "Other?": 1}
    with pytest.raises(SessionError, match="no session 'nowhere'"):
        run_command(chat, "/load nowhere")
    assert len(said(chat)) == 4


def test_save_to_a_file_and_load_it(chat: ChatController, tmp_path: Path) -> None:
    say(chat, "Why?")
    file = tmp_path / "copy.json"
    assert str(file) in shown(chat, f"/save {file}")
    say(chat, "And?")
    assert Conversation.read(file).turns == 1
    shown(chat, f"/save {file}")  # the same conversation may overwrite its own copy
    assert Conversation.read(file).turns == 2
    run_command(chat, "/clear")
    say(chat, "Other?")
    with pytest.raises(RequestError, match="holds another conversation"):
        run_command(chat, f"/save {file}")
    (tmp_path / "notes.json").write_text("{}")
    for path, why in (("/notes.json", "is not a conversation"), ("/", "is a folder")):
        with pytest.raises(RequestError, match=why):
            run_command(chat, f"/save {tmp_path}{path}")
    assert (tmp_path / "notes.json").read_text() == "{}"
    run_command(chat, f"/load {file}")
    say(chat, "More?")
    assert Conversation.read(file).turns == 3  # opening a file continues it


def test_invalid_paths(chat: ChatController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every folder, so the permission error is simulated."""
    say(chat, "Why?")
    look, locked = Path.stat, str(tmp_path / "locked")

    def stat(file: Path, **how: bool) -> os.stat_result:
        if str(file).startswith(locked):
            raise PermissionError(13, "Permission denied")
        return look(file, **how)

    monkeypatch.setattr(Path, "stat", stat)
    paths = ("~nobody-of-that-name/copy.json", f"./{'long' * 100}/copy.json", "a\0b.json", f"{locked}/x.json")
    for line in (f"/{name} {path}" for name in ("save", "load", "draft") for path in paths):
        with pytest.raises(OffspecError) as error:
            run_command(chat, line)
        assert "\n" not in str(error.value)
        chat.complete(line)


def test_title_is_unchanged_if_it_cannot_be_written(chat: ChatController) -> None:
    say(chat, "Why?")
    chat.file.unlink()
    chat.file.mkdir()
    with pytest.raises(OffspecError):
        run_command(chat, "/save Holiday")
    assert chat.session.conversation.title == "Why?"


def test_conversation_with_a_shared_title_is_named_by_its_id(chat: ChatController) -> None:
    for question in ("Why?", "why?"):
        say(chat, question)
        name = "Why?" if question == "Why?" else chat.session.conversation.id
        news = f"New conversation. `/load {name}` continues the previous one."
        assert run_command(chat, "/clear") == NewConversation(news)
    assert isinstance(run_command(chat, f"/load {name}"), NewConversation)


def test_conversation_with_another_model_is_reported(chat: ChatController, archive: SessionArchive) -> None:
    other = Conversation(model="other/model", title="Elsewhere", messages=[Message("user", "Why?")])
    other.write(archive.file_for(other))
    outcome = run_command(chat, "/load Elsewhere")
    assert (
        isinstance(outcome, NewConversation)
        and "earlier answers are from other/model; demo continues" in outcome.note
    )


# Resuming


def test_resume_selects_the_latest_of_this_model(chat: ChatController, archive: SessionArchive) -> None:
    run_command(chat, "/system Be brief.")
    run_command(chat, "/set temperature=0.5 top_k=3")
    say(chat, "Why?")
    sampling = SamplingOverrides({"temperature": 0.9, "top_k": 50})
    setup = replace(SETUP, resume="", sampling=sampling, overrides=frozenset({"temperature"}))
    chat.close()
    again = ChatController(ScriptedEngine([ANSWER]), setup, archive)
    assert said(again) == said(chat) and again.file == chat.file
    assert again.notes == ["Resuming 'Why?' (one question)."]
    assert again.session.system == "Be brief."
    assert (again.session.params.temperature, again.session.params.top_k) == (0.9, 3)
    again.close()
    again.close()
    assert (
        ChatController(ScriptedEngine(), replace(setup, system="Rhyme."), archive).session.system == "Rhyme."
    )


def test_conversation_open_elsewhere_is_not_resumed(chat: ChatController, archive: SessionArchive) -> None:
    say(chat, "Why?")
    other = ChatController(ScriptedEngine([ANSWER]), SETUP, archive)
    say(other, "Other?")
    with pytest.raises(SessionError, match="open in another terminal"):
        run_command(other, "/load Why?")
    say(other, "And?")
    assert said(other) == ["Other?", ANSWER, "And?", ANSWER]
    assert Conversation.read(other.file).turns == 2 and Conversation.read(chat.file).turns == 1
    chat.close()
    assert isinstance(run_command(other, "/load Why?"), NewConversation)


def test_unreadable_conversations_are_named_on_resume(chat: ChatController, archive: SessionArchive) -> None:
    """Even if another one can be resumed: the damaged one may be the one that was meant."""
    say(chat, "Why?")
    chat.close()
    cut = archive.folder / "20260101-000000-abcdef.json"
    cut.write_bytes(chat.file.read_bytes()[:-30])
    again = ChatController(ScriptedEngine(), replace(SETUP, resume=""), archive)
    assert f"{cut} is not a valid session file: line 3 is not JSON" in again.notes[0]
    assert "Resuming 'Why?'" in again.notes[1]
    again.close()
    chat.file.unlink()
    with pytest.raises(
        SessionError, match=r"no conversation with demo can be resumed: .*-abcdef\.json is not"
    ):
        replace(SETUP, resume="").session_to_resume(archive)


def test_resume_by_name_and_without_conversations(chat: ChatController, archive: SessionArchive) -> None:
    new = ChatController(ScriptedEngine(), replace(SETUP, resume=""), archive)
    assert "new one" in new.notes[0]
    say(chat, "Why?")
    chat.close()
    assert said(ChatController(ScriptedEngine(), replace(SETUP, resume="why?"), archive)) == ["Why?", ANSWER]
    with pytest.raises(SessionError):
        ChatController(ScriptedEngine(), replace(SETUP, resume="nowhere"), archive)

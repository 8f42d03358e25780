"""`/draft`: replace the engine within a conversation, or reload the same."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.config import EngineConfig
from offspec.core.errors import DraftError, OffspecError, RequestError, SessionError
from offspec.ui.chat.command_results import Reload
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
from tests.ui.chat.talk import ANSWER, SETUP, said, say, shown


def test_draft(chat: ChatController, tmp_path: Path) -> None:
    for draft in ("none", "some/model", str(tmp_path), "self,some/head,suffix"):
        assert run_command(chat, f"/draft {draft}") == Reload(EngineConfig("demo", draft=draft))
    assert "already" in shown(chat, "/draft auto")
    for wrong in ("modle", "./modle", "/no/such/model", "~/modle.gguf", "suffix,modle"):
        with pytest.raises(RequestError, match="unknown draft"):
            run_command(chat, f"/draft {wrong}")
    with pytest.raises(RequestError, match=r"^unknown draft 'suffixx': did you mean suffix\?$"):
        run_command(chat, "/draft suffixx")
    for wrong, words in (("suffix,suffix", "twice"), (",", "has an empty name")):
        with pytest.raises(RequestError, match=words):
            run_command(chat, f"/draft {wrong}")


def test_loaded_engine_takes_over_immediately(chat: ChatController, engine: ScriptedEngine) -> None:
    engine.sources = ("self", "suffix")
    assert "already" in shown(chat, "/draft auto")
    assert "suffix from the next answer on" in shown(chat, "/draft suffix")
    assert "suffix already" in shown(chat, "/draft suffix")
    assert "suffix,self from the next" in shown(chat, "/draft suffix,self")
    assert "self (4-bit) from the next" in shown(chat, "/draft auto")
    assert isinstance(run_command(chat, "/draft suffix,some/model"), Reload), "which is not loaded"


class Openings(ScriptedLoad):
    """Opens a new engine for each call, with the requested configuration."""

    def __init__(self, *failing: str) -> None:
        super().__init__(ScriptedEngine([ANSWER]), failing=failing)

    def __call__(self, config: EngineConfig, *given: Any, **named: Any) -> ScriptedEngine:
        engine = super().__call__(config, *given, **named)
        engine.config = replace(config, budget=32, width=4)
        return engine


def test_exchange_continues_the_conversation(chat: ChatController, engine: ScriptedEngine) -> None:
    say(chat, "Why?")
    run_command(chat, "/set temperature=0.5")
    opener, none = Openings(), EngineConfig("demo", draft="none")
    chat.reload(none, opener, chat.on_event, pytest.fail)
    assert engine.closed and chat.config == none
    say(chat, "And?")
    assert said(chat) == ["Why?", ANSWER, "And?", ANSWER]
    assert chat.session.params.temperature == 0.5
    assert Conversation.read(chat.file).turns == 2
    assert "already" in shown(chat, "/draft none")
    assert len(opener.engines[0].requests) == 1
    engine.closed = True


def test_failed_exchange_restores_the_engine_with_its_plan(archive: SessionArchive, tmp_path: Path) -> None:
    plan, opener = tmp_path / "plan.json", Openings("bad/draft")
    opener.engine.sources = ("self", "suffix")
    chat = ChatController.open(replace(SETUP, plan=plan), opener, archive, lambda event: None)
    say(chat, "Why?")
    assert "suffix from the next" in shown(chat, "/draft suffix")
    failures: list[OffspecError] = []
    bad = replace(SETUP.config, draft="bad/draft")
    chat.reload(bad, opener, chat.on_event, failures.append)
    assert opener.calls == [(SETUP.config, plan), (bad, None), (SETUP.config, plan)]
    assert [str(failure) for failure in failures] == ["bad/draft has another vocabulary"]
    assert chat.engine.draft == "suffix" and chat.config == SETUP.config
    say(chat, "And?")
    assert len(said(chat)) == 4
    chat.reload(replace(SETUP.config, draft="none"), opener, chat.on_event, pytest.fail)
    chat.reload(bad, opener, chat.on_event, failures.append)
    assert chat.engine.draft == "none", "the earlier choice of sources belonged to the other engine"
    chat.close()


def test_engine_without_a_controller_is_closed(archive: SessionArchive) -> None:
    opener = Openings()
    with pytest.raises(SessionError):
        ChatController.open(replace(SETUP, resume="nowhere"), opener, archive, lambda event: None)
    assert opener.engines[0].closed


def test_chat_survives_two_failures(archive: SessionArchive) -> None:
    """Neither the other draft nor the previous model can be loaded, as when the disk is disconnected."""
    opener = Openings()
    chat = ChatController.open(SETUP, opener, archive, lambda event: None)
    say(chat, "Why?")
    used = chat.session.used
    opener.fail = DraftError("the disk is away")
    with pytest.raises(DraftError, match="away"):
        chat.reload(replace(SETUP.config, draft="none"), opener, chat.on_event, lambda error: None)
    assert not chat.is_open
    with pytest.raises(RequestError, match="/draft auto loads it again"):
        say(chat, "And?")
    assert said(chat) == ["Why?", ANSWER] and chat.session.used == used
    assert "Saved as" in shown(chat, "/save trip")
    opener.fail = None
    outcome = run_command(chat, "/draft auto")
    assert outcome == Reload(SETUP.config), "though these sources are the ones it had"
    chat.reload(outcome.config, opener, chat.on_event, pytest.fail)
    assert chat.is_open and say(chat, "And?") == ANSWER and len(said(chat)) == 4
    chat.close()


def test_renamed_model_is_not_lost(
    archive: SessionArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)  # its name could also be a Hub id
    setup = replace(SETUP, config=replace(SETUP.config, model="some/model"))
    opener = Openings()
    chat = ChatController.open(setup, opener, archive, lambda event: None)
    (tmp_path / "some").rename(tmp_path / "other")
    with pytest.raises(RequestError, match="some/model no longer exists: restore the folder, or /quit"):
        run_command(chat, "/draft none")
    assert say(chat, "Why?") == ANSWER
    (tmp_path / "other").rename(tmp_path / "some")
    assert isinstance(run_command(chat, "/draft none"), Reload)
    chat.close()


def test_context_is_counted_after_exchange_and_resume(archive: SessionArchive) -> None:
    setup = replace(SETUP, system="Be kind, and answer in few words.")
    chat = ChatController(ScriptedEngine([ANSWER]), setup, archive)
    say(chat, "Why is the sky blue?")
    used = chat.session.used
    chat.reload(replace(SETUP.config, draft="none"), Openings(), chat.on_event, pytest.fail)
    assert chat.session.used == used
    chat.close()
    assert ChatController(ScriptedEngine(), replace(setup, resume=""), archive).session.used == used

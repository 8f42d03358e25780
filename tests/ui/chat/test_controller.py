"""Every command, in every state of a chat: new, idle, busy, after an error."""

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat.archive import SessionArchive
from offspec.chat.conversation import Conversation
from offspec.core.config import EngineConfig, SamplingParams
from offspec.core.errors import DiskFullError, RequestError, StreamError
from offspec.core.events import Finished, Notice, TextDelta, TreeSeen
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.ui.chat.command_results import (
    BranchSwitched,
    CopyToClipboard,
    EditQuestion,
    NewConversation,
    OpenView,
    Quit,
    ShowSources,
    StreamAnswer,
    SuggestCommand,
    TurnsRemoved,
)
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import ChatController
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.report import report
from tests.support import sample_plans as samples
from tests.support.fake_engine import Script, ScriptedEngine
from tests.ui.chat.talk import ANSWER, SETUP, finished, said, say, shown

# A new chat


def test_information_commands_in_a_new_chat(chat: ChatController) -> None:
    for line in (
        "/retry",
        "/edit",
        "/edit Why?",
        "/undo",
        "/undo 3",
        "/save",
        "/save name",
        "/copy",
        "/branch",
    ):
        with pytest.raises(RequestError, match=r"yet|the conversation is empty"):
            run_command(chat, line)
    assert run_command(chat, "/help") == OpenView("help")
    assert run_command(chat, "/stats") == OpenView("stats")
    assert run_command(chat, "/sessions") == run_command(chat, "/load") == OpenView("sessions")
    assert run_command(chat, "/quit") == Quit()
    assert "no tree yet" in shown(chat, "/tree")
    assert "no plan" in shown(chat, "/plan")
    assert "self (4-bit)" in shown(chat, "/draft")
    assert isinstance(run_command(chat, "/clear"), NewConversation)
    assert not list(chat.archive.folder.glob("*"))  # no message, so nothing is saved


def test_commands_without_arguments_refuse_them(chat: ChatController) -> None:
    for name, command in COMMANDS.items():
        if not command.takes_argument:
            with pytest.raises(RequestError, match=f"/{name} takes no argument; omit"):
                run_command(chat, f"/{name} now")


def test_plans(archive: SessionArchive) -> None:
    with_plan = ChatController(ScriptedEngine(plan=samples.small()), SETUP, archive)
    assert run_command(with_plan, "/plan") == OpenView("plan")
    engine = ScriptedEngine(config=EngineConfig("demo", draft="none", budget=1))
    chat = ChatController(engine, SETUP, archive)
    assert shown(chat, "/plan").startswith("There is no plan, because without a draft")
    assert "draft none, one token per pass." in report(chat)


# Idle, with messages


def test_answer_is_streamed_and_saved(chat: ChatController, archive: SessionArchive) -> None:
    assert say(chat, "//help, please?") == ANSWER
    assert said(chat) == ["//help, please?", ANSWER]
    assert [entry.title for entry in archive.list()] == ["//help, please?"]
    assert chat.trees[-1].index == 2
    assert chat.stats.answer.tokens == 7
    assert run_command(chat, "/tree") == OpenView("tree")


def test_question_escaping_round_trip(chat: ChatController) -> None:
    say(chat, "/quit now")
    assert said(chat)[0] == "/quit now"
    say(chat, "Why?\nTell me.")
    assert run_command(chat, "/edit") == EditQuestion("Why?\nTell me.", "/edit Why?\nTell me.")
    outcome = run_command(chat, "/edit //help me")
    assert isinstance(outcome, StreamAnswer) and outcome.question == "/help me"
    assert [message.content for message in outcome.dropped] == ["Why?\nTell me.", ANSWER]
    finished(outcome.events)
    assert said(chat) == ["/quit now", ANSWER, "/help me", ANSWER]
    assert run_command(chat, "/edit") == EditQuestion("/help me", "/edit //help me")


def test_trees_are_collected_only_if_enabled(engine: ScriptedEngine, archive: SessionArchive) -> None:
    chat = ChatController(engine, replace(SETUP, trees=False), archive)
    assert not any(isinstance(event, TreeSeen) for event in chat.ask("Why?"))
    assert not chat.trees


def test_identical_retry_is_refused(archive: SessionArchive) -> None:
    engine = ScriptedEngine(["one", "two", "three", "four", "word " * 20])
    chat = ChatController(engine, replace(SETUP, sampling=SamplingOverrides()), archive)
    say(chat, "Why?")
    offer = run_command(chat, "/retry")
    assert (
        isinstance(offer, SuggestCommand) and offer.line == "/retry 0.7" and "temperature 0" in offer.reason
    )
    assert run_command(chat, "/retry 0") == offer and len(engine.requests) == 1
    before = chat.session.messages[-1]
    again = run_command(chat, offer.line)
    assert isinstance(again, StreamAnswer) and again.question is None and again.dropped == (before,)
    assert finished(again.events) == "two"
    assert (
        engine.requests[1].params == SamplingParams(temperature=0.7)
        and chat.session.params == SamplingParams()
    )
    assert run_command(chat, "/retry") == offer, "that answer exists already, as another version"
    run_command(chat, "/set presence_penalty=1")
    again = run_command(chat, "/retry")
    assert isinstance(again, StreamAnswer) and finished(again.events) == "three"
    say(chat, "And?")
    run_command(chat, "/undo")
    run_command(chat, "/system Be kind.")
    assert isinstance(run_command(chat, "/retry"), StreamAnswer), "it begins differently now"
    for wrong in ("-1", "hot"):
        with pytest.raises(RequestError, match="temperature"):
            run_command(chat, f"/retry {wrong}")
    for event in chat.ask("Count."):
        if isinstance(event, TextDelta):
            chat.stop()
    assert chat.session.messages[-1].finish == "halted"
    assert isinstance(run_command(chat, "/retry"), StreamAnswer)
    chat.close()


def test_undo(chat: ChatController) -> None:
    for question in ("One?", "Two?", "Three?"):
        say(chat, question)
    outcome = run_command(chat, "/undo")
    assert isinstance(outcome, TurnsRemoved)
    assert said(chat) == ["One?", ANSWER, "Two?", ANSWER]
    with pytest.raises(RequestError, match="the conversation has only 2 questions; /undo 2"):
        run_command(chat, "/undo 3")
    for wrong in ("0", "-1", "all", "²"):
        with pytest.raises(RequestError, match="not a number above 0"):
            run_command(chat, f"/undo {wrong}")
    with pytest.raises(RequestError, match="only 2 questions"):
        run_command(chat, "/undo " + "9" * 5000)  # more digits than Python reads
    assert len(run_command(chat, "/undo 2").dropped) == 4  # type: ignore[union-attr]
    assert said(chat) == []


def test_undo_and_branch_switch_versions(archive: SessionArchive) -> None:
    chat = ChatController(ScriptedEngine(["a", "b", "c", "d", "e"]), SETUP, archive)
    say(chat, "One?")
    finished(run_command(chat, "/retry").events)  # type: ignore[union-attr]
    say(chat, "Two?")
    finished(run_command(chat, "/edit Three?").events)  # type: ignore[union-attr]
    outcome = run_command(chat, "/undo")
    assert isinstance(outcome, BranchSwitched) and outcome.which == "1 of 2" and outcome.at == 2
    assert [m.content for m in (*outcome.dropped, *outcome.shown)] == ["Three?", "d", "Two?", "c"]
    assert said(chat) == ["One?", "b", "Two?", "c"]
    with pytest.raises(RequestError, match=r"the first of 2 versions.*/undo 1 removes"):
        run_command(chat, "/undo")
    assert shown(chat, "/branch") == (
        "Question 1 has 2 versions; `/branch 1 1` shows the first:\n\n1. One?: a\n2. One?: b (this one)\n\n"
        "Question 2 has 2 versions; `/branch 1 2` shows the first:\n\n1. Two?: c (this one)\n2. Three?: d"
    )
    run_command(chat, "/branch 2")
    assert said(chat) == ["One?", "b", "Three?", "d"]
    run_command(chat, "/branch 1 1")
    assert said(chat) == ["One?", "a"]
    for line, complaint in {
        "3": "only 2 versions of question 1",
        "1 2": "question 2 has no other versions",
        "1 1 1": "at most two numbers: a version and a question",
        "first": "not a number above 0",
    }.items():
        with pytest.raises(RequestError, match=complaint):
            run_command(chat, f"/branch {line}")
    assert isinstance(run_command(chat, "/undo 1"), TurnsRemoved)
    assert said(chat) == [] and not chat.session.branches


def test_system(chat: ChatController) -> None:
    assert "no system message" in shown(chat, "/system")
    assert "whole conversation" not in shown(chat, "/system Be brief.")
    assert shown(chat, "/system").endswith("Be brief.")
    say(chat, "Why?")
    assert "whole conversation" in shown(chat, "/system none")
    assert chat.session.system is None


def test_sources(chat: ChatController) -> None:
    assert [run_command(chat, f"/sources {word}".strip()) for word in ("", "", "on", "on", "off")] == [
        ShowSources(shown) for shown in (True, False, True, True, False)
    ]
    with pytest.raises(RequestError, match="on or off"):
        run_command(chat, "/sources maybe")


def test_copy(archive: SessionArchive) -> None:
    engine = ScriptedEngine(["First.", "<think>\nhm\n</think>\n\nSecond."])
    chat = ChatController(engine, SETUP, archive)
    say(chat, "One?")
    say(chat, "Two?")
    assert run_command(chat, "/copy") == CopyToClipboard("Second.", "the last answer")
    assert run_command(chat, "/copy 2") == CopyToClipboard("First.", "answer 1 of 2")
    with pytest.raises(RequestError, match="only 2 answers"):
        run_command(chat, "/copy 3")


def test_clear_keeps_settings(chat: ChatController) -> None:
    run_command(chat, "/system Be brief.")
    run_command(chat, "/set top_k=5")
    say(chat, "Why?")
    file = chat.file
    outcome = run_command(chat, "/clear")
    assert outcome == NewConversation("New conversation. `/load Why?` continues the previous one.")
    assert said(chat) == [] and not chat.trees
    assert chat.session.system == "Be brief." and chat.session.params.top_k == 5
    say(chat, "Other?")
    assert chat.file != file and Conversation.read(file).turns == 1


def test_clear_on_a_full_disk_names_remedies(
    chat: ChatController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    say(chat, "Why?")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        say(chat, "And?")
        before = said(chat)
        with pytest.raises(
            DiskFullError, match=r"free some space, or keep a copy elsewhere with `/save FILE`"
        ):
            run_command(chat, "/clear")
    assert said(chat) == before
    run_command(chat, f"/save {tmp_path}/copy.json")
    assert Conversation.read(tmp_path / "copy.json").turns == 2


# Busy


def test_commands_allowed_during_an_answer(chat: ChatController, archive: SessionArchive) -> None:
    say(chat, "Before?")
    events = chat.ask("Why?")
    for event in events:
        if isinstance(event, TreeSeen):
            break
    examples = {"set": " top_k=3", "seed": " 5", "help": " set", "save": " A name", "sources": " on"}
    examples["export"] = f" {archive.folder}/talk.md"
    for name, command in COMMANDS.items():
        line = f"/{name}{examples.get(name, '')}"
        if command.while_busy:
            run_command(chat, line)
            continue
        with pytest.raises(RequestError, match="stop the answer first"):
            run_command(chat, line)
    chat.stop()
    result = list(events)[-1]
    assert isinstance(result, Finished) and result.result.finish_reason == "halted"
    assert said(chat)[-1] == "The sky is blue"
    assert chat.stats.live_line() == ""


# After an error


def test_everything_works_after_an_error(archive: SessionArchive) -> None:
    engine = ScriptedEngine([Script("one two three four five", fail_after=1), ANSWER])
    chat = ChatController(engine, SETUP, archive)
    with pytest.raises(StreamError):
        list(chat.ask("Why?"))
    assert said(chat) == ["Why?", "one two three four"]
    assert run_command(chat, "/copy") == CopyToClipboard("one two three four", "the last answer")
    outcome = run_command(chat, "/retry")
    assert isinstance(outcome, StreamAnswer) and outcome.dropped[0].finish == "failed"
    assert finished(outcome.events) == ANSWER
    assert said(chat) == ["Why?", ANSWER]


def test_notices_are_recorded(chat: ChatController) -> None:
    chat.on_event(Notice("reads are buffered"))
    assert chat.notes == ["reads are buffered"]

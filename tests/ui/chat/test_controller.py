"""Every command, in every state of a desk: nothing said, idle, busy, after an error."""

from dataclasses import replace

import pytest

from offspec.chat.archive import Archive
from offspec.chat.conversation import Conversation
from offspec.core.errors import OffspecError, RequestError, StreamError
from offspec.core.events import Finished, Notice, TreeSeen
from offspec.ui.chat.commands import COMMANDS
from offspec.ui.chat.controller import Desk
from offspec.ui.chat.handlers import run_command
from offspec.ui.chat.outcomes import Answer, Copy, Open, Quit, Reset, Rewound, Sources
from tests.support import sample_plans as samples
from tests.support.fake_engine import Script, ScriptedEngine
from tests.ui.chat.talk import ANSWER, SETUP, finished, said, say, shown

# Nothing said yet


@pytest.mark.parametrize(
    "line", ["/retry", "/edit", "/edit Why?", "/undo", "/undo 3", "/save", "/save name", "/copy"]
)
def test_there_must_be_something_first(desk: Desk, line: str) -> None:
    with pytest.raises(RequestError, match="yet"):
        run_command(desk, line)


def test_looking_around_before_anything_is_said(desk: Desk) -> None:
    assert run_command(desk, "/help") == Open("help")
    assert run_command(desk, "/stats") == Open("stats")
    assert run_command(desk, "/sessions") == run_command(desk, "/load") == Open("sessions")
    assert run_command(desk, "/quit") == Quit()
    assert "no tree yet" in shown(desk, "/tree")
    assert "no plan" in shown(desk, "/plan")
    assert "substitute (4-bit)" in shown(desk, "/draft")
    assert isinstance(run_command(desk, "/clear"), Reset)
    assert not list(desk.archive.folder.glob("*"))  # nothing was said, so nothing is kept


def test_a_plan_is_shown_where_there_is_one(archive: Archive) -> None:
    assert run_command(Desk(ScriptedEngine(plan=samples.small()), SETUP, archive), "/plan") == Open("plan")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if not command.takes_argument])
def test_what_takes_nothing_says_so(desk: Desk, name: str) -> None:
    with pytest.raises(RequestError, match=f"/{name} takes nothing after it"):
        run_command(desk, f"/{name} now")


# Idle, with something said


def test_an_answer_is_followed_and_kept(desk: Desk, archive: Archive) -> None:
    assert say(desk, "//help, please?") == ANSWER
    assert said(desk) == ["//help, please?", ANSWER]
    assert [entry.title for entry in archive.list()] == ["//help, please?"]
    assert desk.trees[-1].index == 2
    assert desk.figures.answer.tokens == 7
    assert run_command(desk, "/tree") == Open("tree")


def test_a_question_is_said_as_it_is_and_handed_back_as_it_is_typed(desk: Desk) -> None:
    say(desk, "/quit now")
    assert said(desk)[0] == "/quit now"
    finished(run_command(desk, "/edit //help me").events)  # type: ignore[union-attr]
    assert said(desk)[0] == "/help me"
    outcome = run_command(desk, "/edit")
    assert isinstance(outcome, Rewound) and outcome.text == "//help me"


def test_trees_are_gathered_only_where_wanted(engine: ScriptedEngine, archive: Archive) -> None:
    desk = Desk(engine, replace(SETUP, trees=False), archive)
    assert not any(isinstance(event, TreeSeen) for event in desk.ask("Why?"))
    assert not desk.trees


def test_retry(desk: Desk) -> None:
    say(desk, "Why?")
    before = desk.session.messages[-1]
    outcome = run_command(desk, "/retry")
    assert isinstance(outcome, Answer) and outcome.question is None and outcome.dropped == (before,)
    assert finished(outcome.events) == ANSWER
    assert said(desk) == ["Why?", ANSWER]


def test_edit_with_a_text_asks_in_place_of_the_last_question(desk: Desk) -> None:
    say(desk, "First?")
    say(desk, "Why?")
    outcome = run_command(desk, "/edit Why not?")
    assert isinstance(outcome, Answer) and outcome.question == "Why not?"
    assert [message.content for message in outcome.dropped] == ["Why?", ANSWER]
    finished(outcome.events)
    assert said(desk) == ["First?", ANSWER, "Why not?", ANSWER]


def test_an_edit_that_is_refused_changes_nothing(desk: Desk, engine: ScriptedEngine) -> None:
    say(desk, "First?")
    say(desk, "Why?")
    before, engine.context = desk.session.messages, 60
    outcome = run_command(desk, "/edit " + "word " * 100)
    assert isinstance(outcome, Answer) and outcome.dropped == before[2:]
    with pytest.raises(RequestError, match="context"):
        list(outcome.events)
    assert desk.session.messages == before
    assert Conversation.read(desk.file).messages == list(before)


def test_edit_alone_hands_the_question_back(desk: Desk) -> None:
    say(desk, "Why?\nTell me.")
    outcome = run_command(desk, "/edit")
    assert isinstance(outcome, Rewound) and outcome.text == "Why?\nTell me."
    assert said(desk) == []


def test_undo(desk: Desk) -> None:
    for question in ("One?", "Two?", "Three?"):
        say(desk, question)
    outcome = run_command(desk, "/undo")
    assert isinstance(outcome, Rewound) and outcome.text is None
    assert said(desk) == ["One?", ANSWER, "Two?", ANSWER]
    with pytest.raises(RequestError, match="only 2 questions have been asked; /undo 2"):
        run_command(desk, "/undo 3")
    for wrong in ("0", "00", "-1", "all", "²"):
        with pytest.raises(RequestError, match="no number above 0"):
            run_command(desk, f"/undo {wrong}")
    with pytest.raises(RequestError, match="only 2 questions"):
        run_command(desk, "/undo " + "9" * 5000)  # more digits than Python reads
    assert len(run_command(desk, "/undo 2").dropped) == 4  # type: ignore[union-attr]
    assert said(desk) == []


def test_system(desk: Desk) -> None:
    assert "no system message" in shown(desk, "/system")
    assert "whole conversation" not in shown(desk, "/system Be brief.")
    assert shown(desk, "/system").endswith("Be brief.")
    say(desk, "Why?")
    assert "whole conversation" in shown(desk, "/system none")
    assert desk.session.system is None


def test_sources(desk: Desk) -> None:
    assert [run_command(desk, f"/sources {word}".strip()) for word in ("", "", "on", "on", "off")] == [
        Sources(shown) for shown in (True, False, True, True, False)
    ]
    with pytest.raises(RequestError, match="on or off"):
        run_command(desk, "/sources maybe")


def test_copy(archive: Archive) -> None:
    engine = ScriptedEngine(["First.", "<think>\nhm\n</think>\n\nSecond."])
    desk = Desk(engine, SETUP, archive)
    say(desk, "One?")
    say(desk, "Two?")
    assert run_command(desk, "/copy") == Copy("Second.", "the last answer")
    assert run_command(desk, "/copy 2") == Copy("First.", "answer 1 of 2")
    with pytest.raises(RequestError, match="only 2 answers"):
        run_command(desk, "/copy 3")


def test_clear_begins_anew_with_the_same_settings(desk: Desk) -> None:
    run_command(desk, "/system Be brief.")
    run_command(desk, "/set top_k=5")
    say(desk, "Why?")
    file = desk.file
    outcome = run_command(desk, "/clear")
    assert outcome == Reset("A new conversation. `/load Why?` goes on with the one before.")
    assert said(desk) == [] and not desk.trees
    assert desk.session.system == "Be brief." and desk.session.params.top_k == 5
    say(desk, "Other?")
    assert desk.file != file and Conversation.read(file).turns == 1


# Busy


def test_what_may_run_while_an_answer_comes(desk: Desk) -> None:
    say(desk, "Before?")
    events = desk.ask("Why?")
    for event in events:
        if isinstance(event, TreeSeen):
            break
    examples = {"set": " top_k=3", "seed": " 5", "help": " set", "save": " A name", "sources": " on"}
    for name, command in COMMANDS.items():
        line = f"/{name}{examples.get(name, '')}"
        if command.while_busy:
            run_command(desk, line)
            continue
        with pytest.raises(RequestError, match="stop the answer first"):
            run_command(desk, line)
    desk.stop()
    result = list(events)[-1]
    assert isinstance(result, Finished) and result.result.finish_reason == "halted"
    assert said(desk)[-1] == "The sky is blue"
    assert desk.figures.live_line() == ""


# After an error


def test_after_an_error_everything_works(archive: Archive) -> None:
    engine = ScriptedEngine([Script("one two three four five", fail_after=1), ANSWER])
    desk = Desk(engine, SETUP, archive)
    with pytest.raises(StreamError):
        list(desk.ask("Why?"))
    assert said(desk) == ["Why?", "one two three four"]
    assert run_command(desk, "/copy") == Copy("one two three four", "the last answer")
    outcome = run_command(desk, "/retry")
    assert isinstance(outcome, Answer) and outcome.dropped[0].finish == "failed"
    assert finished(outcome.events) == ANSWER
    assert said(desk) == ["Why?", ANSWER]


def test_a_question_that_is_refused_leaves_no_trace(archive: Archive) -> None:
    desk = Desk(ScriptedEngine(context=8), SETUP, archive)
    for question in ("word " * 20, "  "):
        with pytest.raises(RequestError):
            list(desk.ask(question))
    assert said(desk) == [] and not archive.list()


def test_an_error_before_the_first_pass_can_be_retried(archive: Archive) -> None:
    desk = Desk(ScriptedEngine([Script("x", fail_after=0), ANSWER]), SETUP, archive)
    with pytest.raises(OffspecError):
        list(desk.ask("Why?"))
    outcome = run_command(desk, "/retry")
    assert isinstance(outcome, Answer)
    assert finished(outcome.events) == ANSWER
    assert [content for content in said(desk) if content] == ["Why?", ANSWER]


def test_notices_are_noted(desk: Desk) -> None:
    desk.hear(Notice("reads are buffered"))
    assert desk.notes == ["reads are buffered"]

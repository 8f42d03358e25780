"""Sessions: asking, stopping, refusals, undo, and the content of the file at every moment."""

import errno
import json
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from offspec.chat import autosave
from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import SamplingParams
from offspec.core.errors import ClosedError, DiskFullError, RequestError, SessionError, StreamError
from offspec.core.events import Event, Finished, Notice, Piece, Prefill, TextDelta, TreeSeen
from tests.chat.talks import LONG, on_disk, result_of, said, stop_at
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.waiting import PATIENCE, wait_until

FOUR = "one two three four"  # tokens of a pass


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "kept.json"


def test_turn() -> None:
    engine = ScriptedEngine(["The sky is blue."])
    session = engine.chat(system="Be brief.")
    events = list(session.send("Why?", trees=True))
    assert isinstance(events[0], Prefill) and isinstance(events[-1], Finished)
    assert any(isinstance(event, TreeSeen) for event in events)
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "The sky is blue."
    question, answer = session.messages
    assert (question.role, question.content) == ("user", "Why?")
    assert (answer.role, answer.content, answer.finish) == ("assistant", "The sky is blue.", "eos")
    result, figures = events[-1].result, answer.figures
    assert answer.token_ids == result.token_ids and figures is not None
    assert (figures.tokens, figures.passes) == (result.tokens, result.passes)
    assert (figures.seed, figures.bytes_streamed) == (result.seed, result.bytes_streamed)
    assert session.last == result and not session.busy
    assert session.used == len(engine.requests[0][0]) + result.tokens
    assert session.conversation.title == "Why?"
    whole = engine.requests[0][0] + list(result.token_ids)
    assert result_of(session.send("And?")).reused_tokens == len(whole)
    assert engine.requests[1][0][: len(whole)] == whole


def test_undo_and_ask_differently() -> None:
    engine = ScriptedEngine(["a b", "c d", "e f"])
    session = engine.chat()
    for ask, complaint in ((session.rewind, "no question"), (lambda: list(session.retry()), "no answer")):
        with pytest.raises(RequestError, match=complaint):
            ask()
    for question in ("one", "two", "three"):
        list(session.send(question))
    assert [m.content for m in session.rewind(2)] == ["two", "c d", "three", "e f"]
    assert said(session) == ["one", "a b"]
    assert result_of(session.send("four")).reused_tokens >= len(engine.requests[0][0]) + 2  # the first turn
    assert repr(session).startswith("<Session, 2 questions, ")
    wrong: Any = "x"
    with pytest.raises(RequestError, match="turns must be a whole number, not 'x'"):
        session.rewind(wrong)
    for turns in (3, 0, -1):
        with pytest.raises(RequestError, match="the conversation has 2"):
            session.rewind(turns)
    session.rewind(2)
    assert session.used == 0 and session.conversation.title == ""


def test_refusals_change_nothing(file: Path) -> None:
    engine = ScriptedEngine(["a b"], context=40)
    session = engine.chat()
    list(session.send("fine"))
    session.keep(file)
    session.conversation.updated = "2026-01-01T00:00:00Z"
    session.save(file)
    before, messages, used = file.read_bytes(), session.messages, session.used

    def is_refused(kind: type[Exception], events: Generator[Event], complaint: str) -> None:
        with pytest.raises(kind, match=complaint):
            list(events)
        assert session.messages == messages and session.used == used and not session.busy
        assert file.read_bytes() == before and not session.branches

    ask: Any
    for ask in (session.send, session.edit):
        is_refused(RequestError, ask(3), "the text must be a string, not 3")
        is_refused(RequestError, ask(" \n"), "empty")
        is_refused(RequestError, ask("\ud800"), "Unicode")
        is_refused(RequestError, ask("word " * 50), "room for 40")
    engine.closed = True
    for events in (session.send("Two."), session.edit("Two."), session.retry()):
        is_refused(ClosedError, events, "closed")
    engine.closed, engine.context = False, 4
    is_refused(RequestError, session.retry(), "room for 4")
    engine.context = 40
    list(session.send("fine too"))


class Withholding(ScriptedEngine):
    """Withholds the end of the answer, which could begin a stop string, until it is complete."""

    def stream(self, *args: Any, **more: Any) -> Generator[Event, None, None]:
        try:
            for event in super().stream(*args, **more):
                if isinstance(event, Finished):
                    yield TextDelta(" held", (), (Piece(" held", "bonus"),))
                yield event
        except StreamError:
            yield TextDelta(" held", (), (Piece(" held", "bonus"),))
            raise


def test_error_during_an_answer(file: Path) -> None:
    session = Withholding([Script(LONG, fail_after=2), "Better."]).chat()
    session.keep(file)
    with pytest.raises(StreamError):
        list(session.send("Well?"))
    partial = "one two three four five six seven eight held"
    assert on_disk(file) == [("Well?", None), (partial, "failed")]
    figures = session.messages[1].figures
    assert figures is not None and (figures.tokens, figures.passes, figures.seed) == (8, 2, None)
    assert result_of(session.send("Go on.")).finish_reason == "eos"


def test_stop_and_ask_again() -> None:
    engine = ScriptedEngine([LONG, "Yes."])
    session = engine.chat()
    events = stop_at(session, session.send("Count."), TextDelta)
    assert result_of(events).finish_reason == "halted"
    assert said(session)[-1] == FOUR and session.messages[-1].finish == "halted"
    done = result_of(session.send("More?"))
    assert done.reused_tokens == len(engine.requests[0][0]) + 4
    assert done.finish_reason == "eos"  # an old stop does not affect later answers


def test_stop_before_the_turn_leaves_nothing() -> None:
    session = ScriptedEngine(["a"]).chat()
    waiting = [session.send("One?"), session.retry(), session.edit("Two?")]
    session.stop()
    for events in waiting:
        with pytest.raises(RequestError, match="cancelled while queued"):
            list(events)
    assert session.messages == () and not session.busy
    assert result_of(session.send("Count.")).finish_reason == "eos"


def test_abandoned_answer_is_saved_with_withheld_text(file: Path) -> None:
    session = Withholding([LONG]).chat()
    session.keep(file)
    events = session.send("Count.")
    next(event for event in events if isinstance(event, TextDelta))
    events.close()
    assert on_disk(file)[-1] == (f"{FOUR} held", "halted") and not session.busy
    figures = session.messages[1].figures
    assert figures is not None and figures.seed == 7  # as the engine sends it at the end
    list(session.send("More."))


def test_error_while_abandoning_an_answer_is_not_raised() -> None:
    class Failing(ScriptedEngine):
        def stream(self, *args: Any, **more: Any) -> Generator[Event, None, None]:
            for event in super().stream(*args, **more):
                yield event
                if isinstance(event, TextDelta):
                    raise StreamError("read failed", file="x", offset=0)

    session = Failing([LONG]).chat()
    events = session.send("Count.")
    next(event for event in events if isinstance(event, TextDelta))
    events.close()
    assert session.messages[1].finish == "halted" and not session.busy


def test_interrupt_by_ctrl_c() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()

    def interrupt(event: Event) -> None:
        if not isinstance(event, Prefill) and getattr(event, "index", 0) == 3:
            raise KeyboardInterrupt

    engine.notify = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(session.send("Count."))
    assert session.messages[-1].finish == "halted" and session.messages[-1].content.endswith("eight")
    assert not session.busy


def test_engine_that_ends_without_a_result() -> None:
    class Ended(ScriptedEngine):
        def stream(self, *args: Any, **more: Any) -> Any:
            return (event for event in list(super().stream(*args, **more))[:2])

    session = Ended([LONG]).chat()
    with pytest.raises(ClosedError, match="closed during the answer"):
        list(session.send("Count."))
    assert said(session)[-1] == FOUR


def test_same_thread_does_not_wait_for_itself() -> None:
    session = ScriptedEngine([LONG]).chat()
    events = session.send("Count.")
    next(events)
    assert session.busy
    actions: list[Callable[[], object]] = [
        lambda: list(session.send("And?")),
        lambda: list(session.retry()),
        lambda: list(session.edit("But?")),
        lambda: setattr(session, "system", "x"),
        lambda: session.resume(Conversation(model="demo")),
        lambda: session.switch(0),
        session.rewind,
        session.clear,
        session.recount,
    ]
    for action in actions:
        with pytest.raises(RequestError, match="in progress"):
            action()
    assert result_of(events).finish_reason == "eos" and said(session) == ["Count.", LONG]


def test_session_is_idle_when_the_end_is_reported() -> None:
    session = ScriptedEngine(["a", "b"]).chat()
    for event in session.send("One."):
        if isinstance(event, Finished):
            assert not session.busy and said(session)[-1] == "a"
            list(session.send("Two."))
    assert session.conversation.turns == 2


def test_threads_take_turns() -> None:
    session = ScriptedEngine([LONG], delay=0.002).chat()
    threads = [threading.Thread(target=lambda n=n: list(session.send(f"Question {n}."))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(said(session)[::2]) == [f"Question {n}." for n in range(5)]
    assert said(session)[1::2] == [LONG] * 5


def test_stop_cancels_waiting_questions() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    engine.gate.clear()
    first = threading.Thread(target=lambda: list(session.send("One.")))
    first.start()
    assert engine.at_gate.wait(PATIENCE)
    errors: list[str] = []
    waiting = session.send("Two.")

    def wait() -> None:
        try:
            list(waiting)
        except RequestError as error:
            errors.append(str(error))

    second = threading.Thread(target=wait)
    second.start()
    session.stop()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert len(errors) == 1 and "cancelled while queued" in errors[0]
    assert said(session) == ["One.", ""] and session.messages[-1].finish == "halted"


def test_new_conversation_does_not_overwrite_the_old_one(file: Path) -> None:
    session = ScriptedEngine(["a"]).chat(system="Be kind.", params=SamplingParams(seed=3))
    session.keep(file)
    list(session.send("Hi."))
    old = session.conversation
    session.clear()
    assert session.messages == () and session.used == 0 and session.last is None
    assert session.conversation.id != old.id and len(old.messages) == 2
    assert session.system == "Be kind." and session.params.seed == 3
    list(session.send("Other."))
    assert on_disk(file)[0] == ("Hi.", None)


def test_system_text_applies_to_the_next_question() -> None:
    engine = ScriptedEngine(["a"])
    session = engine.chat()
    list(session.send("Hi."))
    session.system = "Be kind."
    list(session.send("Hi again."))
    assert engine.wording.decode_with_special(engine.requests[1][0]).startswith("<|system|>Be kind.")
    session.system = ""
    assert session.system is None


def test_question_is_saved_before_the_answer_starts(tmp_path: Path) -> None:
    engine = ScriptedEngine(["Hello."])
    session = engine.chat()
    file, killed = tmp_path / "deep" / "kept.json", tmp_path / "killed.json"
    session.keep(file)
    assert not file.parent.exists()  # no answer yet
    events = session.send("One.")
    next(events)
    killed.write_text(file.read_text())
    events.close()
    again = Session.load(engine, killed)
    list(again.send("Two."))
    assert said(again) == ["One.", "", "Two.", "Hello."]
    again.save(tmp_path / "saved.json")
    assert Session.load(engine, tmp_path / "saved.json").messages == again.messages


def test_partial_answer_is_saved_during_a_long_pass(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosave, "INTERVAL_S", 0.02)
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    session.keep(file)

    def ask() -> None:
        for event in session.send("Count."):
            if isinstance(event, TextDelta) and event.text == FOUR:
                engine.gate.clear()  # the next pass hangs

    thread = threading.Thread(target=ask)
    thread.start()
    assert engine.at_gate.wait(PATIENCE)
    wait_until(lambda: len(on_disk(file)) == 2)
    assert on_disk(file) == [("Count.", None), (FOUR, None)]
    assert said(Session.load(engine, file)) == ["Count.", FOUR]  # as after a kill
    engine.gate.set()
    thread.join(PATIENCE)
    assert on_disk(file)[1] == (LONG, "eos")
    assert not [thread for thread in threading.enumerate() if thread.name == "offspec keeper"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_write_errors(tmp_path: Path, file: Path, full: list[int], code: int) -> None:
    session = ScriptedEngine(["a b", "c", "d", "e"]).chat()

    def notices(question: str) -> list[str]:
        return [event.text for event in session.send(question) if isinstance(event, Notice)]

    session.keep(file)
    assert not notices("One.")
    before = file.read_bytes()
    full.append(code)
    (notice,) = notices("Two.")
    assert "kept.json" in notice and "\n" not in notice and said(session)[-1] == "c"
    assert not notices("Three.")  # it was answered
    assert session.conversation.turns == 3 and file.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))  # nothing half-written
    with pytest.raises(DiskFullError if code == errno.ENOSPC else SessionError):
        session.save(tmp_path / "other.json")
    full.clear()
    for wrong in (file / "x.json", tmp_path / "a\0b"):
        with pytest.raises(SessionError, match="cannot write the session"):
            session.save(wrong)
    assert not notices("Four.") and len(on_disk(file)) == 8
    full.append(code)
    assert notices("Five.")  # asked again


def test_cost_of_a_turn_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(["word " * 20], context=10**6)
    tokenize, tokenized = engine.wording.tokenize, list[str]()

    def listen(text: str) -> list[int]:
        tokenized.append(text)
        return tokenize(text)

    monkeypatch.setattr(engine.wording, "tokenize", listen)
    session = engine.chat()
    for n in range(200):
        tokenized.clear()
        list(session.send(f"Question {n}."))
        assert sum(map(len, tokenized)) < 400  # the new question, and the scripted answer
    assert session.conversation.turns == 200
    assert Conversation.from_json(json.loads(session.conversation.to_text())) == session.conversation

"""A session: asked, stopped, refused, tried again and taken back, and what its file holds at every moment."""

import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.chat import autosave as keeper
from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.config import SamplingParams
from offspec.core.errors import ClosedError, DiskFullError, RequestError, SessionError, StreamError
from offspec.core.events import Event, Finished, Notice, Prefill, TextDelta, TreeSeen
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.waiting import PATIENCE, until

LONG = "one two three four five six seven eight nine ten eleven twelve"


def said(session: Session) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in session.messages]


def text(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def on_disk(file: Path) -> list[tuple[str, str, str | None]]:
    return [(m.role, m.content, m.finish) for m in Conversation.read(file).messages]


def test_a_turn() -> None:
    engine = ScriptedEngine(["The sky is blue."])
    session = engine.chat(system="Be brief.")
    events = list(session.send("Why?", trees=True))
    assert isinstance(events[0], Prefill) and isinstance(events[-1], Finished)
    assert text(events) == "The sky is blue." and any(isinstance(event, TreeSeen) for event in events)
    assert said(session) == [("user", "Why?"), ("assistant", "The sky is blue.")]
    answer, result = session.messages[1], events[-1].result
    assert answer.token_ids == result.token_ids and answer.finish == "eos" and answer.figures is not None
    assert (answer.figures.tokens, answer.figures.passes) == (result.tokens, result.passes)
    assert (answer.figures.seed, answer.figures.bytes_streamed) == (result.seed, result.bytes_streamed)
    assert session.last == result and not session.busy
    assert session.used == len(engine.asked[0][0]) + result.tokens
    assert session.conversation.title == "Why?"


def test_the_second_turn_begins_with_the_first() -> None:
    engine = ScriptedEngine(["The sky is blue.", "Because."])
    session = engine.chat()
    first = list(session.send("What?"))[-1]
    second = list(session.send("Why?"))[-1]
    assert isinstance(first, Finished) and isinstance(second, Finished)
    whole = engine.asked[0][0] + list(first.result.token_ids)
    assert engine.asked[1][0][: len(whole)] == whole
    assert second.result.reused_tokens == len(whole)


def test_taken_back_and_asked_otherwise() -> None:
    engine = ScriptedEngine(["a b", "c d", "e f"])
    session = engine.chat()
    for question in ("one", "two", "three"):
        list(session.send(question))
    dropped = session.rewind(2)
    assert [m.content for m in dropped] == ["two", "c d", "three", "e f"]
    assert said(session) == [("user", "one"), ("assistant", "a b")]
    done = list(session.send("four"))[-1]
    assert isinstance(done, Finished)
    assert done.result.reused_tokens >= len(engine.asked[0][0]) + 2  # the whole first turn
    for turns in (3, 0, -1):
        with pytest.raises(RequestError, match="the conversation has 2"):
            session.rewind(turns)
    session.rewind(2)
    assert session.used == 0 and session.conversation.title == ""
    with pytest.raises(RequestError, match="no question"):
        session.rewind()


@pytest.mark.parametrize(
    ("use", "complaint"),
    [
        (lambda session: list(session.send(3)), "the text must be a string, not 3"),
        (lambda session: list(session.edit([{"role": "user"}])), "the text must be a string, not "),
        (lambda session: setattr(session, "system", 3), "the text must be a string, not 3"),
        (lambda session: session.rewind("x"), "turns must be a whole number, not 'x'"),
    ],
    ids=["send", "edit", "system", "rewind"],
)
def test_values_of_another_type_are_refused(use: Callable[[Any], object], complaint: str) -> None:
    session = ScriptedEngine(["a"]).chat()
    list(session.send("one"))
    assert repr(session).startswith("<Session, 1 question, ")
    with pytest.raises(RequestError, match=complaint):
        use(session)
    assert said(session) == [("user", "one"), ("assistant", "a")]


def test_retry_moves_a_fixed_seed_on() -> None:
    engine = ScriptedEngine(["a", "b", "c", "d"])
    session = engine.chat(params=SamplingParams(temperature=1.0, seed=2**64 - 2))
    list(session.send("Well?"))
    list(session.retry())
    list(session.retry())
    assert [asked.params.seed for asked in engine.asked] == [2**64 - 2, 2**64 - 1, 0]
    assert said(session) == [("user", "Well?"), ("assistant", "c")]
    assert session.params.seed == 2**64 - 2
    assert engine.asked[0][0] == engine.asked[1][0] == engine.asked[2][0]
    session.params = SamplingParams(temperature=1.0)
    list(session.retry())
    assert engine.asked[3][1].seed is None


def test_retry_where_nothing_was_asked() -> None:
    with pytest.raises(RequestError, match="no answer"):
        list(ScriptedEngine().chat().retry())


@pytest.mark.parametrize(
    ("question", "complaint"),
    [("", "empty"), (" \n", "empty"), ("\ud800", "Unicode"), ("word " * 50, "room for 40")],
)
def test_a_refused_question_leaves_all_as_it_was(tmp_path: Path, question: str, complaint: str) -> None:
    session = ScriptedEngine(["a b"], context=40).chat()
    list(session.send("fine"))
    session.keep(tmp_path / "kept.json")
    before, used = (tmp_path / "kept.json").read_bytes(), session.used
    with pytest.raises(RequestError, match=complaint):
        list(session.send(question))
    assert said(session) == [("user", "fine"), ("assistant", "a b")] and session.used == used
    assert (tmp_path / "kept.json").read_bytes() == before and not session.busy
    list(session.send("fine too"))


def test_a_retry_that_is_refused_keeps_the_answer() -> None:
    engine = ScriptedEngine(["a b"])
    session = engine.chat()
    list(session.send("Well?"))
    engine.closed = True
    with pytest.raises(ClosedError):
        list(session.retry())
    with pytest.raises(ClosedError):
        list(session.send("Again?"))
    assert said(session) == [("user", "Well?"), ("assistant", "a b")]


def test_a_fault_in_mid_answer(tmp_path: Path) -> None:
    engine = ScriptedEngine([Script(LONG, fail_after=2), "Better."])
    session = engine.chat()
    session.keep(tmp_path / "kept.json")
    with pytest.raises(StreamError):
        list(session.send("Well?"))
    partial = "one two three four five six seven eight"
    assert on_disk(tmp_path / "kept.json") == [("user", "Well?", None), ("assistant", partial, "failed")]
    figures = session.messages[1].figures
    assert figures is not None and (figures.tokens, figures.passes, figures.seed) == (8, 2, None)
    done = list(session.send("Go on."))[-1]
    assert isinstance(done, Finished) and done.result.reused_tokens >= 8
    assert said(session)[-1] == ("assistant", "Better.")


def test_a_fault_before_the_first_word() -> None:
    engine = ScriptedEngine([Script("x", fail_after=0), "Hello.", "Hello again."])
    session = engine.chat()
    with pytest.raises(StreamError):
        list(session.send("One."))
    assert said(session) == [("user", "One."), ("assistant", "")]
    list(session.send("Two."))
    assert session.conversation.prompt()[0] == {"role": "user", "content": "One.\n\nTwo."}
    list(session.retry())
    assert said(session)[2:] == [("user", "Two."), ("assistant", "Hello again.")]


def test_stopped_and_asked_again() -> None:
    engine = ScriptedEngine([LONG, "Yes."])
    session = engine.chat()
    events: list[Event] = []
    for event in session.send("Count."):
        events.append(event)
        if isinstance(event, TextDelta):
            session.stop()
    assert isinstance(events[-1], Finished) and events[-1].result.finish_reason == "halted"
    assert said(session)[-1] == ("assistant", "one two three four")
    assert session.messages[-1].finish == "halted"
    done = list(session.send("More?"))[-1]
    assert isinstance(done, Finished)
    assert done.result.reused_tokens == len(engine.asked[0][0]) + 4
    assert done.result.finish_reason == "eos"  # an old stop does not stop what comes later


def test_stopped_before_it_was_read() -> None:
    session = ScriptedEngine([LONG]).chat()
    events = session.send("Count.")
    session.stop()
    with pytest.raises(RequestError, match="before its turn"):
        list(events)
    assert said(session) == [] and not session.busy
    assert isinstance(list(session.send("Count."))[-1], Finished)


def test_closed_early(tmp_path: Path) -> None:
    session = ScriptedEngine([LONG, "Yes."]).chat()
    session.keep(tmp_path / "kept.json")
    events = session.send("Count.")
    next(event for event in events if isinstance(event, TextDelta))
    events.close()
    expected = ("assistant", "one two three four", "halted")
    assert on_disk(tmp_path / "kept.json")[-1] == expected and not session.busy
    list(session.send("More?"))


def test_interrupted_by_ctrl_c() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()

    def interrupt(event: Event) -> None:
        if isinstance(event, Prefill) or getattr(event, "index", 0) < 3:
            return
        raise KeyboardInterrupt

    engine.notify = interrupt
    with pytest.raises(KeyboardInterrupt):
        list(session.send("Count."))
    assert session.messages[-1].finish == "halted" and session.messages[-1].content.endswith("eight")
    assert not session.busy


def test_an_engine_that_ends_without_a_word() -> None:
    class Ended(ScriptedEngine):
        def stream(self, *args: Any, **more: Any) -> Any:
            return (event for event in list(super().stream(*args, **more))[:2])

    session = Ended([LONG]).chat()
    with pytest.raises(ClosedError, match="middle of the answer"):
        list(session.send("Count."))
    assert said(session)[-1] == ("assistant", "one two three four")


def test_the_same_thread_does_not_wait_for_itself() -> None:
    session = ScriptedEngine([LONG]).chat()
    events = session.send("Count.")
    next(events)
    assert session.busy
    actions: list[Callable[[], object]] = [
        lambda: list(session.send("And?")),
        lambda: list(session.retry()),
        session.rewind,
        session.clear,
        lambda: setattr(session, "system", "x"),
        lambda: session.resume(Conversation(model="demo")),
        lambda: list(session.edit("But?")),
    ]
    for action in actions:
        with pytest.raises(RequestError, match="under way"):
            action()
    assert isinstance(list(events)[-1], Finished)
    assert said(session) == [("user", "Count."), ("assistant", LONG)]


def test_busy_no_longer_when_the_end_is_told() -> None:
    session = ScriptedEngine(["a", "b"]).chat()
    for event in session.send("One."):
        if isinstance(event, Finished):
            assert not session.busy and said(session)[-1] == ("assistant", "a")
            list(session.send("Two."))
    assert session.conversation.turns == 2


def test_threads_take_turns() -> None:
    session = ScriptedEngine([LONG], delay=0.002).chat()
    threads = [threading.Thread(target=lambda n=n: list(session.send(f"Question {n}."))) for n in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    asked = [content for role, content in said(session) if role == "user"]
    assert sorted(asked) == [f"Question {n}." for n in range(5)]
    assert said(session)[1::2] == [("assistant", LONG)] * 5


def test_stop_reaches_those_that_wait() -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    engine.gate.clear()
    errors: list[BaseException] = []
    first = threading.Thread(target=lambda: list(session.send("One.")))
    first.start()
    assert engine.held.wait(PATIENCE)

    def wait() -> None:
        try:
            list(session.send("Two."))
        except RequestError as error:
            errors.append(error)

    events = session.send("Three.")
    second = threading.Thread(target=wait)
    second.start()
    until(lambda: len(session._halts) == 3)
    session.stop()
    first.join(PATIENCE)
    second.join(PATIENCE)
    assert len(errors) == 1 and "before its turn" in str(errors[0])
    assert said(session) == [("user", "One."), ("assistant", "")] and session.messages[-1].finish == "halted"
    events.close()


def test_a_new_conversation() -> None:
    session = ScriptedEngine(["a"]).chat(system="Be kind.", params=SamplingParams(seed=3))
    list(session.send("Hi."))
    old = session.conversation
    session.clear()
    assert session.messages == () and session.used == 0 and session.last is None
    assert session.conversation.id != old.id and len(old.messages) == 2
    assert session.system == "Be kind." and session.params.seed == 3


def test_a_new_conversation_is_not_written_over_the_old_one(tmp_path: Path) -> None:
    session = ScriptedEngine(["a"]).chat()
    session.keep(tmp_path / "old.json")
    list(session.send("Hi."))
    session.clear()
    list(session.send("Other."))
    assert on_disk(tmp_path / "old.json")[0] == ("user", "Hi.", None)


def test_the_system_text_changes_what_is_asked_next() -> None:
    engine = ScriptedEngine(["a"])
    session = engine.chat()
    list(session.send("Hi."))
    session.system = "Be kind."
    list(session.send("Hi again."))
    assert engine.wording.spell(engine.asked[1][0]).startswith("<|system|>Be kind.")
    with pytest.raises(RequestError, match="Unicode"):
        session.system = "\udfff"
    session.system = ""
    assert session.system is None


def test_saved_and_loaded(tmp_path: Path) -> None:
    engine = ScriptedEngine(["a b c", "d"])
    session = engine.chat(system="Be kind.", params=SamplingParams(temperature=0.5, stop=("x",)))
    list(session.send("Hi 🦊\nthere."))
    session.save(str(tmp_path / "new folder" / "chat.json"))
    same = Session.load(engine, tmp_path / "new folder" / "chat.json")
    assert same.conversation == replace(session.conversation, id=same.conversation.id) and same.used > 0
    list(same.send("More."))
    list(session.send("More."))
    assert engine.asked[1][0] == engine.asked[2][0]  # as if it had gone on


def test_loaded_by_another_model(tmp_path: Path) -> None:
    from offspec.core.config import EngineConfig

    session = ScriptedEngine(["a b c"]).chat()
    list(session.send("Hi."))
    session.save(tmp_path / "chat.json")
    other = ScriptedEngine(["d"], config=EngineConfig(model="other"))
    again = Session.load(other, tmp_path / "chat.json")
    assert again.conversation.model == "other"
    list(again.send("More."))
    assert (
        other.wording.spell(other.asked[0][0])
        == "<|user|>Hi.\n<|assistant|>a b c\n<|user|>More.\n<|assistant|>"
    )


def test_the_question_is_written_before_the_answer_starts(tmp_path: Path) -> None:
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    session.keep(tmp_path / "deep" / "kept.json")
    assert not (tmp_path / "deep").exists()  # nothing was said
    events = session.send("Count.")
    next(events)
    assert on_disk(tmp_path / "deep" / "kept.json") == [("user", "Count.", None)]
    events.close()


def test_what_comes_is_written_while_a_pass_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "EVERY_S", 0.02)
    engine = ScriptedEngine([LONG])
    session = engine.chat()
    session.keep(tmp_path / "kept.json")
    texts: list[str] = []

    def ask() -> None:
        for event in session.send("Count."):
            if isinstance(event, TextDelta) and not texts:
                texts.append(event.text)
                engine.gate.clear()  # the next pass hangs

    thread = threading.Thread(target=ask)
    thread.start()
    assert engine.held.wait(PATIENCE)
    until(lambda: len(on_disk(tmp_path / "kept.json")) == 2)
    assert on_disk(tmp_path / "kept.json")[1] == ("assistant", texts[0], None)
    loaded = Session.load(engine, tmp_path / "kept.json")  # as after a kill
    assert said(loaded) == [("user", "Count."), ("assistant", texts[0])]
    engine.gate.set()
    thread.join(PATIENCE)
    assert on_disk(tmp_path / "kept.json")[1] == ("assistant", LONG, "eos")
    assert not [t for t in threading.enumerate() if t.name == "offspec keeper"]


def test_killed_before_the_answer_came(tmp_path: Path) -> None:
    engine = ScriptedEngine(["Hello."])
    session = engine.chat()
    session.keep(tmp_path / "kept.json")
    events = session.send("One.")
    next(events)
    killed = (tmp_path / "kept.json").read_text()
    events.close()
    (tmp_path / "killed.json").write_text(killed)
    again = Session.load(engine, tmp_path / "killed.json")
    list(again.send("Two."))
    assert said(again) == [("user", "One."), ("assistant", ""), ("user", "Two."), ("assistant", "Hello.")]
    again.save(tmp_path / "saved.json")
    assert Session.load(engine, tmp_path / "saved.json").messages == again.messages


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A disk that says the first of these errors, while there is one."""
    errors: list[int] = []
    usual = os.replace

    def replace(source: object, target: object) -> None:
        if errors:
            raise OSError(errors[0], os.strerror(errors[0]))
        usual(str(source), str(target))

    monkeypatch.setattr(os, "replace", replace)
    yield errors


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_cannot_be_written(tmp_path: Path, full: list[int], code: int) -> None:
    session = ScriptedEngine(["a b", "c", "d", "e"]).chat()
    session.keep(tmp_path / "kept.json")
    list(session.send("One."))
    before = (tmp_path / "kept.json").read_bytes()
    full.append(code)
    events = list(session.send("Two."))
    notices = [event.text for event in events if isinstance(event, Notice)]
    assert len(notices) == 1 and "kept.json" in notices[0] and "\n" not in notices[0]
    assert text(events) == "c" and isinstance(events[-1], Finished)
    assert isinstance(events[0], Prefill)
    assert not [event for event in session.send("Three.") if isinstance(event, Notice)]
    assert session.conversation.turns == 3 and (tmp_path / "kept.json").read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))  # nothing half-written
    with pytest.raises(DiskFullError if code == errno.ENOSPC else SessionError):
        session.save(tmp_path / "other.json")
    full.clear()
    list(session.send("Four."))
    assert len(on_disk(tmp_path / "kept.json")) == 8
    full.append(code)
    assert [event for event in session.send("Five.") if isinstance(event, Notice)]  # told anew


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    session = ScriptedEngine(["a"]).chat()
    session.keep(tmp_path / "file" / "kept.json")
    assert [event for event in session.send("One.") if isinstance(event, Notice)]
    with pytest.raises(SessionError, match="cannot write the session"):
        session.save(tmp_path / "file" / "x.json")
    with pytest.raises(SessionError):
        session.save(tmp_path / "a\0b")
    assert said(session)[-1] == ("assistant", "a")


def test_the_two_hundredth_turn_costs_what_the_second_did(monkeypatch: pytest.MonkeyPatch) -> None:
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

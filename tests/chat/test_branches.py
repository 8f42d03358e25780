"""Retries and edits: the replaced turns are kept, can be selected again, and are written to the file."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.chat import autosave
from offspec.chat.branches import Branch, MessageTree
from offspec.chat.conversation import Conversation, Message
from offspec.chat.session import Session
from offspec.core.config import SamplingParams
from offspec.core.errors import ClosedError, RequestError, SessionError, StreamError
from offspec.core.events import Prefill, TextDelta
from tests.chat.talks import result_of, said, stop_at
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.waiting import wait_until


def versions(session: Session) -> list[tuple[int, int, list[str]]]:
    """Every fork: its position, the active version, and the last message of each version."""
    return [(f.at, f.active, [v[-1].content for v in f.versions]) for f in session.branches]


def test_retry_keeps_the_previous_answer() -> None:
    engine = ScriptedEngine(["a b", "c d", "e f", "g"])
    session = engine.chat()
    list(session.send("One?"))
    first = session.messages[1]
    list(session.retry())
    list(session.retry())
    assert said(session) == ["One?", "e f"] and versions(session) == [(0, 2, ["a b", "c d", "e f"])]
    session.switch(0)
    assert session.messages == (Message("user", "One?"), first) and first.token_ids
    assert result_of(session.send("Two?")).reused_tokens >= len(engine.requests[0][0])
    session.switch(1)
    session.switch(0)
    assert said(session) == ["One?", "a b", "Two?", "g"], "with what followed it"


def test_edit_keeps_the_previous_question() -> None:
    engine = ScriptedEngine(["a", "b", "c", "d"])
    session = engine.chat()
    with pytest.raises(RequestError, match="no question"):
        list(session.edit("Else?"))
    list(session.send("One?"))
    list(session.edit("Two?"))
    assert said(session) == ["Two?", "b"] and session.conversation.title == "Two?"
    session.switch(0)
    assert said(session) == ["One?", "a"] and session.conversation.title == "One?"
    list(session.send("Three?"))
    assert result_of(session.edit("Four?")).reused_tokens >= len(engine.requests[0][0]) + 1

    async def work() -> None:
        assert [event async for event in session.aedit("Five?")]

    asyncio.run(work())
    assert said(session) == ["One?", "a", "Five?", "a"]


@pytest.mark.parametrize("script", ["b", Script("b", fail_after=0)], ids=["stopped", "failed"])
def test_empty_retry_replaces_nothing(tmp_path: Path, script: Any) -> None:
    session = ScriptedEngine(["a", script, "c"]).chat()
    session.keep(tmp_path / "kept.json")
    list(session.send("One?"))
    session.conversation.updated = "2026-01-01T00:00:00Z"
    session.params = session.params  # writes
    before, used, talk = session.messages, session.used, (tmp_path / "kept.json").read_bytes()
    try:
        stop_at(session, session.retry(), Prefill)
    except StreamError:
        assert script != "b"
    assert session.messages == before and not session.branches and session.used == used
    assert (tmp_path / "kept.json").read_bytes() == talk
    list(session.retry())
    assert versions(session) == [(0, 1, ["a", "c"])]


def test_question_without_an_answer() -> None:
    """A new answer replaces none; a new question is the only one, as after a kill."""
    session = ScriptedEngine([Script("x", fail_after=0), "b", "c"]).chat()
    with pytest.raises(StreamError):
        list(session.send("One?"))
    list(session.retry())
    assert said(session) == ["One?", "b"] and not session.branches
    session.conversation.change(session.messages[:1])
    list(session.edit("Two?"))
    assert said(session) == ["Two?", "c"]


def test_unknown_versions_are_errors() -> None:
    session = ScriptedEngine(["a"]).chat()
    for ask in (session.send("One?"), session.retry()):
        with pytest.raises(RequestError, match="only one version"):
            session.switch(0)
        list(ask)
    for wrong in (2, -1):
        with pytest.raises(RequestError, match="does not exist; choose from 0 to 1"):
            session.switch(wrong)
    with pytest.raises(RequestError, match="only one version"):
        session.switch(0, at=2)


# Seeds


def seeds(engine: ScriptedEngine) -> list[int | None]:
    return [asked.params.seed for asked in engine.requests]


def seeded(session: Session, seed: int | None) -> None:
    session.params = replace(session.params, seed=seed)


def test_retry_increments_a_fixed_seed() -> None:
    engine = ScriptedEngine(["x"])
    session = engine.chat(params=SamplingParams(temperature=1.0))
    list(session.send("One?"))  # with a seed of its own
    for seed, times in ((2**64 - 2, 3), (5, 1), (None, 1)):
        seeded(session, seed)
        for _ in range(times):
            list(session.retry())
        assert session.params.seed == seed
    assert seeds(engine) == [None, 2**64 - 2, 2**64 - 1, 0, 5, None]
    assert len({tuple(asked.prompt) for asked in engine.requests}) == 1


def test_fixed_seed_differs_from_all_versions() -> None:
    engine = ScriptedEngine(["a", "b", "c"])
    session = engine.chat(params=SamplingParams(temperature=1.0, seed=5))
    list(session.send("One?"))
    list(session.retry())
    session.switch(0)
    engine.closed = True
    with pytest.raises(ClosedError):  # moves nothing
        list(session.retry())
    engine.closed = False
    list(session.retry())
    list(session.send("Two?"))  # has no version yet
    list(session.retry())
    assert seeds(engine) == [5, 6, 7, 5, 6]


def test_newly_set_seed_close_to_the_last_one() -> None:
    engine = ScriptedEngine(["x"])
    session = engine.chat(params=SamplingParams(temperature=1.0, seed=3))
    list(session.send("One?"))
    seeded(session, 2)
    list(session.send("Two?"))
    list(session.retry())  # 3
    session.rewind()  # back to an answer with that seed, which no retry chose
    list(session.send("Two?"))
    session.rewind()
    list(session.retry())
    assert seeds(engine) == [3, 2, 3, 2, 2]


# Content of the file


def nested() -> Conversation:
    """Two versions of the second turn; one of them is followed by two versions of the third."""
    q = [Message("user", f"Question {n}?") for n in range(4)]
    a = [Message("assistant", f"Answer {n}.", finish="eos") for n in range(6)]
    inner = Branch(4, 1, (q[2], a[3]))
    branches = (Branch(2, 0, (q[1], a[1], q[2], a[2]), (inner,)), Branch(2, 2, (q[3],)))
    return Conversation(model="demo", messages=[q[0], a[0], q[1], a[5]], branches=branches)


def test_file_has_one_line_per_branch_message(tmp_path: Path) -> None:
    talk = nested()
    talk.write(tmp_path / "x.json")
    assert Conversation.read(tmp_path / "x.json") == talk
    lines = (tmp_path / "x.json").read_text().splitlines()
    assert lines[0].startswith('{"offspec_session": 2, ')
    assert lines[5:] == [
        '], "branches": [',
        '{"at": 2, "number": 0, "messages": [',
        '{"role": "assistant", "content": "Answer 1.", "finish": "eos"},',
        '{"role": "user", "content": "Question 2?"},',
        '{"role": "assistant", "content": "Answer 2.", "finish": "eos"}',
        '], "branches": [',
        '{"at": 4, "number": 1, "messages": [',
        '{"role": "assistant", "content": "Answer 3.", "finish": "eos"}',
        "]}",
        "]},",
        '{"at": 2, "number": 2, "messages": [',
        '{"role": "user", "content": "Question 3?"}',
        "]}",
        "]}",
    ], "a question that is asked again is written once"


def test_conversation_without_branches_uses_format_version_1() -> None:
    talk = nested()
    talk.branches = ()
    text = talk.to_text()
    assert text.startswith('{"offspec_session": 1, ') and "branches" not in text


_WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    ((), {}, "branches is {}; it should be a list"),
    ((1,), 5, "branches[1] is 5"),
    ((0, "at"), 1, "branches[0].at is 1; it should be the index of a question, an even number of 0 to 3"),
    ((0, "at"), 4, "branches[0].at is 4"),
    ((0, "at"), -2, "branches[0].at is -2"),
    ((0, "number"), 3, "branches[0].number is 3; it should be a number of 0 to 2"),
    ((0, "number"), 2, "branches[0].number is 2"),
    ((0, "messages"), [], "branches[0].messages is []; it should be a list of at least one message"),
    ((0, "messages", 0), "Hi.", 'branches[0].messages[0] is "Hi."'),
    ((0, "messages", 1, "role"), "assistant", "branches[0].messages[1].role is"),
    ((0, "messages", 1, "content"), "\ud83d", "branches[0].messages[1].content is"),
    ((0, "branches"), None, "branches[0].branches is null"),
    ((0, "branches", 0, "at"), 2, "branches[0].branches[0].at is 2; it should be the index of a question"),
    ((0, "branches", 0, "messages", 0, "finish"), "bored", "branches[0].branches[0].messages[0].finish is"),
    ((1, "mood"), "good", "branches[1].mood is not known here"),
]


@pytest.mark.parametrize(("where", "value", "complaint"), _WRONG)
def test_damaged_branch_is_named_with_its_position(
    tmp_path: Path, where: tuple[Any, ...], value: Any, complaint: str
) -> None:
    data: Any = json.loads(nested().to_text())
    place: Any = data
    keys = ("branches", *where)
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    (tmp_path / "x.json").write_text(json.dumps(data))
    with pytest.raises(SessionError) as caught:
        Conversation.read(tmp_path / "x.json")
    assert complaint in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_deeply_nested_branches(tmp_path: Path) -> None:
    deep = '{"at": 0, "number": 0, "messages": [], "branches": ['
    begin = nested().to_text().split('"branches": [')[0]
    for count in (5000, 450, 300):
        wrong = f'{begin}"branches": [{deep * count}{"]}" * count}]}}'
        (tmp_path / "x.json").write_text(wrong)
        with pytest.raises(SessionError, match=r"x\.json"):
            Conversation.read(tmp_path / "x.json")


def test_file_during_a_retry_has_every_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autosave, "INTERVAL_S", 0.01)
    file, whole = tmp_path / "kept.json", "The whole answer."
    session = ScriptedEngine([whole, "one two three four five six seven eight"]).chat()
    session.keep(file)
    list(session.send("Well?"))
    events = session.retry()
    next(events)
    killed = Session.load(ScriptedEngine(), file)
    assert said(killed) == ["Well?", whole] and not killed.branches
    next(event for event in events if isinstance(event, TextDelta))
    wait_until(lambda: "one two" in file.read_text())
    killed = Session.load(ScriptedEngine(), file)
    assert said(killed)[1].startswith("one two") and killed.messages[1].finish is None
    killed.switch(0)
    assert said(killed) == ["Well?", whole]
    events.close()


# Any sequence of operations, compared with turns that know their parents


@dataclass(eq=False)
class Turn:
    """A question and its answer. latest: the child that was active last."""

    parent: "Turn | None"
    question: str = ""
    answer: str | None = None
    next: list["Turn"] = field(default_factory=list)
    latest: "Turn | None" = None

    def add(self, question: str, answer: str) -> "Turn":
        self.latest = Turn(self, question, answer)
        self.next.append(self.latest)
        return self.latest

    def end(self) -> "Turn":
        return self if self.latest is None else self.latest.end()

    def path(self) -> list["Turn"]:
        return [] if self.parent is None else [*self.parent.path(), self]

    def all(self) -> list["Turn"]:
        return [self, *(turn for child in self.next for turn in child.all())]


_STEPS: list[tuple[str, Any]] = [("send", None), ("retry", None), ("retry", None), ("edit", None)] * 3
_STEPS += [("send", 0), ("retry", 0), ("retry", 1), ("edit", 1), ("rewind", 1), ("resume", None)]
_STEPS += [("switch", (fork, version)) for fork in range(3) for version in range(3)]


def compare(session: Session, root: Turn) -> None:
    path = root.end().path()
    assert said(session) == [text for turn in path for text in (turn.question, turn.answer)]
    forks = {2 * at: turn.parent.next for at, turn in enumerate(path) if turn.parent}
    expected = [
        (at, turns.index(path[at // 2]), [turn.answer for turn in turns])
        for at, turns in forks.items()
        if len(turns) > 1
    ]
    assert versions(session) == expected
    kept = json.dumps(session.conversation.to_text())
    for turn in root.all()[1:]:
        assert json.dumps(turn.answer)[1:-1] in kept
    assert Conversation.from_json(json.loads(session.conversation.to_text())) == session.conversation


@given(st.lists(st.sampled_from(_STEPS), min_size=12, max_size=24))
@settings(deadline=None, max_examples=80)
def test_no_sequence_of_operations_loses_an_answer(actions: list[tuple[str, Any]]) -> None:
    """stopped: number of passes, of two, before a stop; None for an answer that finishes."""
    answers = [f"w{n}a w{n}b w{n}c w{n}d w{n}e w{n}f." for n in range(20)]
    engine = ScriptedEngine([Script(answer, pass_tokens=2) for answer in answers])
    session, root = engine.chat(), Turn(None)
    for number, (name, value) in enumerate(actions):
        last = root.end()
        if name == "switch":
            forks = session.branches
            if not forks:
                continue
            fork = forks[value[0] % len(forks)]
            to = value[1] % len(fork.versions)
            session.switch(to, fork.at)
            here = last.path()[fork.at // 2].parent
            assert here is not None
            here.latest = here.next[to]
        elif name == "rewind":
            turns = min(value, len(last.path()))
            if not turns:
                continue
            session.rewind(turns)
            here = last.path()[-turns].parent
            assert here is not None
            here.next, here.latest = [], None
        elif name == "resume":
            talk = Conversation.from_json(json.loads(session.conversation.to_text()))
            session = engine.chat()
            session.resume(talk)
        elif name != "send" and last.parent is None:
            continue
        else:
            ask = {"send": session.send, "edit": session.edit}.get(name)
            events = session.retry() if ask is None else ask(f"{name} {number}?")
            words, passes = answers[len(engine.requests) % len(answers)].split(), 0
            if value == 0:
                stop_at(session, events, Prefill)
            for event in events:
                passes += isinstance(event, TextDelta)
                if passes == value:
                    session.stop()
            came = " ".join(words if value is None else words[: 2 * value])
            above = last if name == "send" else last.parent
            question = last.question if name == "retry" else f"{name} {number}?"
            assert above is not None
            if name == "retry" and not last.answer:
                last.answer = came or last.answer
            elif name != "retry" or came:
                above.add(question, came)
        compare(session, root)


def test_trees_are_immutable() -> None:
    tree = MessageTree((Message("user", "One?"), Message("assistant", "a")))
    other = tree.forked(0).extended(Message("user", "Two?"))
    assert tree.branches == () and other.messages == (Message("user", "Two?"),)
    assert other.switched(0, 0).switched(0, 1) == other

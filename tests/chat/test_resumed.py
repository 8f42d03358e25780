"""Resumed conversations: on another model, with tokens that it lacks, without counting tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from offspec.chat.branches import Branch
from offspec.chat.conversation import Conversation, Message
from offspec.chat.session import Session
from offspec.core.config import EngineConfig, SamplingParams
from tests.support.fake_engine import ScriptedEngine


def talk(model: str, *ids: tuple[int, ...]) -> Conversation:
    messages = [
        message
        for number, said in enumerate(ids)
        for message in (Message("user", f"Question {number}?"), Message("assistant", "Good day", said, "eos"))
    ]
    return Conversation(model=model, messages=messages)


def kept_ids(session: Session) -> list[bool]:
    return [message.token_ids is not None for message in session.messages[1::2]]


@pytest.fixture
def engine() -> ScriptedEngine:
    """An engine that knows two words."""
    engine = ScriptedEngine(config=EngineConfig(model="mine"))
    engine.wording.tokenize("Good day")
    return engine


def test_tokens_of_another_model_are_dropped(engine: ScriptedEngine) -> None:
    session, other = engine.chat(), talk("other", (0, 1), (0, 1))
    other.branches = (Branch(2, 0, tuple(other.messages[2:])),)
    session.resume(other)
    assert kept_ids(session) == [False, False] and session.conversation.model == "mine"
    assert [version[1].token_ids for version in session.branches[0].versions] == [None, None]
    list(session.send("So?"))
    assert engine.wording.decode_with_special(engine.requests[0][0]).count("Good day") == 2


def test_tokens_that_the_model_lacks_are_dropped(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a conversation with a model of the same name whose files have changed."""
    usual, session = engine.wording.decode_with_special, engine.chat()
    for unknown in (10**6, 2**31 - 1):
        session.resume(talk("mine", (0, 1), (0, unknown)))
        assert kept_ids(session) == [True, False]
    monkeypatch.setattr(engine.wording, "decode_with_special", lambda ids: usual([i for i in ids if i < 2]))
    session.resume(talk("mine", (0, 1), (0, 1, 5)))  # is decoded to nothing
    assert kept_ids(session) == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.resume(talk("mine", *[(0, 1)] * 50)),
        lambda session: setattr(session, "system", "Be kind."),
    ],
)
def test_long_conversation_is_not_tokenized_until_it_continues(
    engine: ScriptedEngine, change: Callable[[Session], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = engine.chat()
    list(session.send("Well?"))
    with monkeypatch.context() as patch:
        for name in ("tokenize", "render"):
            patch.setattr(engine.wording, name, None)  # must not be called
        change(session)
        assert session.used > 0
    list(session.send("So?"))
    assert session.last is not None
    assert session.used == len(engine.requests[-1][0]) + session.last.tokens  # counted now


@pytest.mark.parametrize("stop", [0, 1])
def test_reload_and_count_change_nothing(tmp_path: Path, stop: int) -> None:
    engine, file = ScriptedEngine(["It scatters more than red light does."]), tmp_path / "new" / "x.json"
    params = SamplingParams(temperature=0.5, stop=("x",))
    session = engine.chat(system="Be kind, and answer in few words.", params=params)
    for question in ("Why is the sky 🦊\nblue?", "And at night?", "So?")[stop:]:
        list(session.send(question))
    used = session.used
    session.save(str(file))
    again = Session.load(engine, file)
    assert again.conversation == replace(session.conversation, id=again.conversation.id) and again.used > 0
    again.recount()
    assert again.used == used == len(engine.requests[-1][0]) + 7
    list(again.send("And then?"))
    list(session.send("And then?"))
    assert engine.requests[-1][0] == engine.requests[-2][0] and again.used == session.used
    again.rewind(1)
    assert again.used == used
    again.system = None
    again.recount()
    assert again.used < used

"""Conversations taken up again: on another model, with tokens that it lacks, without counting them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from offspec.chat.conversation import Conversation, Message
from offspec.chat.session import Session
from offspec.core.config import EngineConfig
from offspec.core.errors import RequestError
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


def test_tokens_of_another_model_are_dropped() -> None:
    engine = ScriptedEngine(config=EngineConfig(model="mine"))
    engine.wording.tokenize("Good day and more")
    session = engine.chat()
    session.resume(talk("other", (0, 1), (2, 3)))
    assert kept_ids(session) == [False, False] and session.conversation.model == "mine"
    list(session.send("So?"))
    assert engine.wording.spell(engine.asked[0][0]).count("Good day") == 2


@pytest.mark.parametrize("unknown", [10**6, 2**31 - 1])
def test_tokens_that_the_model_lacks_are_dropped(unknown: int) -> None:
    """As in a conversation with a model of the same name, whose files were others then."""
    engine = ScriptedEngine(config=EngineConfig(model="mine"))
    engine.wording.tokenize("Good day")
    session = engine.chat()
    session.resume(talk("mine", (0, 1), (0, unknown)))
    assert kept_ids(session) == [True, False]


def test_a_tokenizer_that_spells_what_it_lacks_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(config=EngineConfig(model="mine"))
    engine.wording.tokenize("Good day")
    usual = engine.wording.spell
    monkeypatch.setattr(engine.wording, "spell", lambda ids: usual([i for i in ids if i < 2]))
    session = engine.chat()
    session.resume(talk("mine", (0, 1), (0, 1, 5)))
    assert kept_ids(session) == [True, False]


@pytest.mark.parametrize(
    "change",
    [
        lambda session: session.resume(talk("demo", *[(0, 1)] * 50)),
        lambda session: setattr(session, "system", "Be kind."),
    ],
)
def test_a_long_conversation_is_not_tokenised_before_it_goes_on(
    change: Callable[[Session], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine()
    engine.wording.tokenize("Good day")
    session = engine.chat()
    list(session.send("Well?"))
    with monkeypatch.context() as patch:
        for name in ("tokenize", "render"):
            patch.setattr(engine.wording, name, None)  # not to be called
        change(session)
        assert session.used > 0
    list(session.send("So?"))
    assert session.last is not None
    assert session.used == len(engine.asked[-1][0]) + session.last.tokens  # counted now


def test_loaded_with_its_own_words_and_settings(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    session = engine.chat(system="Be kind.")
    session.params = session.params.__class__(temperature=0.5)
    list(session.send("Well?"))
    session.save(tmp_path / "x.json")
    again = Session.load(engine, tmp_path / "x.json")
    assert again.system == "Be kind." and again.params.temperature == 0.5


@pytest.mark.parametrize("stop", [0, 1])
def test_counted_again_it_is_as_it_was(tmp_path: Path, stop: int) -> None:
    engine = ScriptedEngine(["It scatters more than red light does."])
    session = engine.chat(system="Be kind, and answer in few words.")
    for question in ("Why is the sky blue?", "And at night?", "So?")[stop:]:
        list(session.send(question))
    used = session.used
    session.save(tmp_path / "x.json")
    again = Session.load(engine, tmp_path / "x.json")
    again.recount()
    assert again.used == used == len(engine.asked[-1][0]) + 7
    list(again.send("And then?"))
    list(session.send("And then?"))
    assert engine.asked[-1][0] == engine.asked[-2][0] and again.used == session.used
    again.rewind(1)
    assert again.used == used
    again.system = None
    again.recount()
    assert again.used < used


def test_no_recount_while_an_answer_comes() -> None:
    session = ScriptedEngine(["Well " * 40]).chat()
    answer = session.send("Why?")
    next(answer)
    with pytest.raises(RequestError, match="under way"):
        session.recount()
    list(answer)
    session.recount()

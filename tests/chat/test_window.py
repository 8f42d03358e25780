"""A conversation longer than the context: its first turns are omitted from the prompt only."""

from itertools import pairwise
from pathlib import Path

import pytest

from offspec.chat.conversation import Conversation
from offspec.chat.session import Session
from offspec.core.errors import RequestError
from offspec.core.events import Finished, Notice, Prefill
from tests.support.fake_engine import ScriptedEngine

CONTEXT = 200
ANSWER = "a b c d e f g h i j k l m n"  # about 20 tokens, with the question and the marks of a template


def ask(session: Session, text: str) -> tuple[int, list[str]]:
    """Ask a question; return the number of reused tokens and the notices."""
    events = list(session.send(text))
    assert isinstance(events[-1], Finished)
    return events[-1].result.reused_tokens, [event.text for event in events if isinstance(event, Notice)]


def prompts(engine: ScriptedEngine) -> list[str]:
    return [engine.wording.decode_with_special(asked[0]) for asked in engine.requests]


def test_first_turns_are_omitted_reported_and_kept(tmp_path: Path) -> None:
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    session = engine.chat(system="Be brief.")
    session.keep(tmp_path / "kept.json")
    told: list[str] = []
    for n in range(12):
        told, left, at = ask(session, f"Question {n} of many?")[1], session.left_out, n
        if told:
            break
    assert told == [f"the first {left} questions are left out: the context holds 200 tokens"]
    assert [n for n in range(at + 1) if f"Question {n} " in prompts(engine)[-1]] == list(range(left, at + 1))
    assert all(prompt.startswith("<|system|>Be brief.\n<|user|>Question") for prompt in prompts(engine))
    assert session.conversation.turns == at + 1 == Conversation.read(tmp_path / "kept.json").turns


def test_omission_frees_a_quarter_of_the_context() -> None:
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    session = engine.chat()
    turns = []
    for n in range(60):
        turns.append(ask(session, f"Question {n} of many?"))
        left = session.messages[2 * session.left_out : -1]
        plain = Conversation(model="demo", messages=list(left))
        assert prompts(engine)[-1] == engine.wording.render(plain.prompt())
    sizes = [len(asked[0]) for asked in engine.requests]
    slid = [n for n, (_, notices) in enumerate(turns) if notices]
    assert len(slid) > 3
    assert all(sizes[n] <= CONTEXT * 3 // 4 for n in slid)
    assert max(sizes) <= CONTEXT - CONTEXT // 8
    for n, (reused, _) in enumerate(turns):
        if n and n not in slid:
            assert reused >= sizes[n - 1] + 10  # the last prompt and its answer
    assert all(later - earlier > 1 for earlier, later in pairwise(slid))


def test_retry_keeps_the_window_and_undo_frees_space() -> None:
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    session = engine.chat()
    for n in range(12):
        ask(session, f"Question {n} of many?")
    left, used = session.left_out, session.used
    assert left
    assert not [event for event in session.retry() if isinstance(event, Notice)]
    assert engine.requests[-1][0] == engine.requests[-2][0] and session.used == used
    session.rewind(1)
    assert session.left_out == left and session.used < used
    session.rewind(8)
    assert session.left_out == 0
    assert ask(session, "And now?")[1] == [] and "Question 0 " in prompts(engine)[-1]


def test_long_question_is_sent_alone_and_a_longer_one_refused() -> None:
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    session = engine.chat()
    for n in range(3):
        ask(session, f"Question {n} of many?")
    assert ask(session, "word " * 185)[1] == [
        "the first 3 questions are left out: the context holds 200 tokens"
    ]
    before = session.messages
    with pytest.raises(RequestError, match=r"the question has .* room for 200 .* shorten it"):
        ask(session, "word " * 200)
    assert session.messages == before and session.left_out == 3
    list(session.edit("short again"))  # all of it fits
    assert session.left_out == 0 and "Question 0 " in prompts(engine)[-1]


def test_resumed_conversation_finds_its_window(tmp_path: Path) -> None:
    session = ScriptedEngine([ANSWER], context=2000).chat()
    for n in range(20):
        ask(session, f"Question {n} of many?")
    session.save(tmp_path / "long.json")
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    resumed = Session.load(engine, tmp_path / "long.json")
    assert resumed.used == CONTEXT  # an estimate, and at most the total
    reused, told = ask(resumed, "And now?")
    assert reused == 0 and told and isinstance(next(iter(resumed.send("Then?"))), Prefill)
    assert 2 < resumed.left_out < 20 and resumed.conversation.turns == 22


def test_huge_question_is_refused_before_full_tokenization(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine([ANSWER], context=CONTEXT)
    seen: list[int] = []
    whole = engine.wording.tokenize

    def tokenize(text: str) -> list[int]:
        seen.append(len(text))
        return whole(text)

    monkeypatch.setattr(engine.wording, "tokenize", tokenize)
    with pytest.raises(RequestError, match="more than 400 tokens"):
        ask(engine.chat(), "word " * 400_000)
    assert max(seen) <= 2**16

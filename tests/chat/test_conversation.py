"""Conversations and their files: round trips, and one-line errors for damaged files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.chat.conversation import Conversation, Message
from offspec.chat.message import AnswerFigures
from offspec.core.config import SamplingParams
from offspec.core.errors import SessionError

_texts = st.text(st.characters(codec="utf-8"), max_size=30)
_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 1e300),
    presence_penalty=st.floats(-1e9, 1e9),
    top_k=st.integers(0, 2**80),
    seed=st.none() | st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 2**80),
    stop=st.lists(_texts.filter(bool), max_size=2),
    ignore_eos=st.booleans(),
)
_figures = st.builds(
    AnswerFigures,
    tokens=st.integers(0, 10**9),
    passes=st.integers(0, 10**9),
    seconds=st.floats(0, 1e9),
    bytes_streamed=st.integers(0, 2**60),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
_answers = st.builds(
    Message,
    role=st.just("assistant"),
    content=_texts,
    token_ids=st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    finish=st.sampled_from([None, "eos", "stop", "length", "context", "halted", "failed"]),
    figures=st.none() | _figures,
    opened=st.sampled_from(["", "<think>\n"]),
)
_questions = st.builds(Message, role=st.just("user"), content=_texts)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    turns = draw(st.lists(st.tuples(_questions, _answers), max_size=3))
    messages = [message for turn in turns for message in turn]
    if messages and draw(st.booleans()):
        messages.pop()
    model = draw(_texts | st.just("caf\udce9"))
    return Conversation(model=model, system=draw(st.none() | _texts), params=draw(_params), messages=messages)


@given(conversations())
@settings(deadline=None, max_examples=50)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, talk: Conversation) -> None:
    file = tmp_path_factory.mktemp("talk") / "x.json"
    talk.write(file)
    assert Conversation.read(file) == talk
    assert Conversation.from_json(json.loads(talk.to_text())) == talk


def sample() -> Conversation:
    figures = AnswerFigures(2, 1, 0.5, 1000, 7)
    return Conversation(
        model="demo",
        id="20260102-030405-abcdef",
        created="2026-01-02T03:04:05Z",
        updated="2026-01-02T03:04:06Z",
        system="Be kind.",
        messages=[
            Message("user", "Why\nso?"),
            Message("assistant", "So.", (5, 6), "eos", figures, "<think>\n"),
            Message("user", "And?"),
        ],
    )


def as_json() -> dict[str, Any]:
    data: dict[str, Any] = json.loads(sample().to_text())
    return data


def test_file_is_readable_lines() -> None:
    lines = sample().to_text().splitlines()
    assert lines[0].startswith('{"offspec_session": 1, "id": "20260102-030405-abcdef", "title": "Why"')
    assert lines[1] == '{"role": "user", "content": "Why\\nso?"},' and len(lines) == 5
    assert "日本" in Conversation(model="日本").to_text()


_HUGE = 10**400
_WRONG: list[tuple[tuple[Any, ...], Any, str]] = [
    (("offspec_session",), 3, "reads up to 2: use a newer one"),
    (("offspec_session",), True, "offspec_session"),
    (("id",), "../../etc/passwd", "id is"),
    (("id",), "a" * 65, "id is"),
    (("id",), "a\n", "id is"),
    (("title",), "\ud800", "title is"),
    (("model",), ["demo"], "model is"),
    (("created",), "yesterday", "created is"),
    (("updated",), "2026-13-01T00:00:00Z", "updated is"),
    (("turns",), -1, "turns is"),
    (("params",), None, "params is"),
    (("params", "temperature"), float("nan"), "params.temperature is"),
    (("params", "top_k"), 1.0, "params.top_k is"),
    (("params", "seed"), 2**64, "seed must be"),
    (("params", "stop"), "x", "params.stop is"),
    (("params", "stop"), ["\ud800"], "params.stop[0] is"),
    (("params", "ignore_eos"), 1, "params.ignore_eos is"),
    (("params", "\ud800\n\x1b[31m"), 1, "is not known here"),
    (("messages",), {}, "messages is"),
    (("messages", 0), None, "messages[0] is"),
    (("messages", 0, "role"), "assistant", "messages[0].role is"),
    (("messages", 1, "role"), "user", "take turns"),
    (("messages", 1, "role"), "system", "messages[1].role is"),
    (("messages", 0, "content"), "a\ud83d", "messages[0].content is"),
    (("messages", 0, "token_ids"), [1], "messages[0].token_ids is not allowed"),
    (("messages", 1, "token_ids"), [1, -1], "messages[1].token_ids is"),
    (("messages", 1, "token_ids"), [2**31], "messages[1].token_ids is"),
    (("messages", 1, "token_ids"), [_HUGE] * 3, "messages[1].token_ids is"),
    (("messages", 1, "finish"), "bored", "messages[1].finish is"),
    (("messages", 1, "figures", "seconds"), float("inf"), "messages[1].figures.seconds is"),
    (("messages", 1, "figures", "colour"), 1, "messages[1].figures.colour is not known"),
    (("messages", 1, "opened"), 1, "messages[1].opened is"),
    (("mood",), "good", "mood is not known"),
]


@pytest.mark.parametrize(("where", "value", "complaint"), _WRONG)
def test_invalid_values_are_named(tmp_path: Path, where: tuple[Any, ...], value: Any, complaint: str) -> None:
    data = as_json()
    place = data
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = value
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(data))
    with pytest.raises(SessionError) as caught:
        Conversation.read(file)
    message = str(caught.value)
    assert complaint in message and str(file) in message
    assert len(message.splitlines()) == 1 and message.isprintable() and len(message) < 700
    with pytest.raises(SessionError):
        Conversation.from_json(data)


def test_missing_values_are_named() -> None:
    for key in as_json().keys() - {"offspec_session"}:
        data = as_json()
        del data[key]
        with pytest.raises(SessionError, match=f"^{key} is missing"):
            Conversation.from_json(data)


def test_parameters_may_be_missing() -> None:
    data = as_json()
    data["params"] = {"temperature": 1}
    assert Conversation.from_json(data).params == SamplingParams(temperature=1.0)


def test_foreign_files_and_every_truncation(tmp_path: Path) -> None:
    file, whole = tmp_path / "talk.json", sample().to_text().encode()
    foreign = [b"\xff\xfe\x00", b"null", b"[1]", b'"text"', b'{"model": "demo"}', b"[" * 100_000]
    foreign += [b'{"offspec_session": ' + b"9" * 5000 + b"}", whole + b"{}"]
    for content in (*foreign, *(whole[:size] for size in range(0, len(whole) - 2, 7))):
        file.write_bytes(content)
        with pytest.raises(SessionError, match=r"talk\.json") as caught:
            Conversation.read(file)
        assert len(str(caught.value).splitlines()) == 1
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(SessionError, match="cannot read the session"):
            Conversation.read(path)


def test_titles() -> None:
    talk = Conversation(model="m")
    assert talk.title == "" and talk.turns == 0 and talk.id != Conversation(model="m").id
    talk.change([Message("user", "\n  What\tis \x1b[31mit?  \nTell me.")])
    assert talk.title == "What is [31mit?" and talk.turns == 1
    talk.change([Message("user", "x" * 100)])
    assert talk.title == "x" * 59 + "…"
    talk.title = "My own"
    talk.change([Message("user", "Other")])
    assert talk.title == "My own"


def test_prompts() -> None:
    talk = Conversation(
        model="m",
        system="Be kind.",
        messages=[
            Message("user", "One."),
            Message("assistant", "", finish="failed"),
            Message("user", "Two."),
            Message("assistant", "Hm.</think>So.", opened="<think>\n"),
            Message("user", "Three."),
        ],
    )
    system, both = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "One.\n\nTwo."}
    answer = {"role": "assistant", "content": "<think>\nHm.</think>So."}
    assert talk.prompt() == [system, both, answer, {"role": "user", "content": "Three."}]
    assert talk.prompt(1) == [system, {"role": "user", "content": "One."}]
    assert talk.prompt(3) == [system, both]
    assert Conversation(model="m").prompt() == []

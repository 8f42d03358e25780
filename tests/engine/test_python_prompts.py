"""Prompts from Python: all forms, messages to continue, and template variables."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offspec
from offspec import Engine, Finished, Message, RequestError, Result, SamplingParams, Session
from tests.support.answers import sampling
from tests.support.tiny_models import tiny_engine, write_model

TEMPLATE = (
    "{% for m in messages %}{{ 'w20' if m['role'] == 'user' else 'w21' }} {{ m['content'] }} w22 {% endfor %}"
    "{% if add_generation_prompt %}w21 {{ 'w23 ' if enable_thinking is not false else '' }}{% endif %}"
)
IDS = [5, 9, 17]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, allowed_token_ids=range(3, 96))
QUIET = {"enable_thinking": False}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model(tmp_path_factory.mktemp("python") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with tiny_engine(model, "none", budget=1) as engine:
        yield engine


def said(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


ARRAYS: dict[str, Any] = {
    "tuple": tuple(IDS),
    "numpy bytes": np.array(IDS, np.uint8),
    "numpy numbers": [np.int32(token) for token in IDS],
    "torch": torch.tensor(IDS),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_ids_in_arrays_and_tensors_are_those_of_a_list(engine: Engine, kind: str) -> None:
    assert engine.generate(ARRAYS[kind], PARAMS).token_ids == engine.generate(IDS, PARAMS).token_ids
    assert engine.count_tokens(ARRAYS[kind]) == 3


WRONG: dict[str, tuple[Any, str]] = {
    "bytes": (b"w5 w9", "decode it first"),
    "nothing": (None, "not NoneType"),
    "one message": (said("user", "w5"), "not dict"),
    "an iterator": (iter(IDS), "not list_iterator"),
    "an empty array": (np.array([], int), "empty"),
    "fractions": ([5.0, 9.0], "whole numbers"),
    "switches": ([True, False], "whole numbers"),
    "an array of fractions": (np.array([5.0]), "whole numbers"),
    "an array without a dimension": (np.array(5), "one-dimensional"),
    "an array of two": (np.array([IDS]), "one prompt per call"),
    "a tensor of two with one token": (torch.tensor([[5]]), "one prompt per call"),
    "ids and messages": ([5, said("user", "w5")], "whole numbers"),
    "an id below 0": ([-1], "outside the vocabulary"),
    "an id that is too large": ([10**9], "outside the vocabulary"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_prompt_is_one_line(engine: Engine, kind: str) -> None:
    prompt, told = WRONG[kind]
    for ask in (engine.generate, engine.count_tokens):
        with pytest.raises(RequestError, match=told) as caught:
            ask(prompt)
        assert "\n" not in str(caught.value)


def test_an_answer_that_was_begun_is_continued(engine: Engine) -> None:
    begun = [said("user", "w5 w9"), said("assistant", "w7 w8")]
    same = engine.generate([20, 5, 9, 22, 21, 7, 8], PARAMS)
    assert engine.generate(begun, PARAMS).token_ids == same.token_ids
    assert engine.count_tokens(begun) == 7
    assert list(engine.stream(begun, PARAMS))[-1].result.token_ids == same.token_ids  # type: ignore[union-attr]
    # One in which nothing is said yet is begun by the template; one with a question behind it is over.
    assert engine.count_tokens([said("user", "w5 w9"), said("assistant", " ")]) == len([20, 5, 9, 22, 21, 23])
    assert engine.count_tokens([*begun, said("user", "w5")]) == len(
        [20, 5, 9, 22, 21, 7, 8, 22, 20, 5, 22, 21, 23]
    )


def test_variables_of_the_template(engine: Engine) -> None:
    thinking, quiet = [20, 5, 22, 21, 23], [20, 5, 22, 21]
    assert engine.count_tokens("w5") == 5 and engine.count_tokens("w5", chat_template_kwargs=QUIET) == 4
    answers = [engine.generate(ids, PARAMS).token_ids for ids in (thinking, quiet)]
    assert answers[0] == engine.generate("w5", PARAMS).token_ids
    assert answers[1] == engine.generate("w5", PARAMS, chat_template_kwargs=QUIET).token_ids
    assert answers[0] == engine.generate("w5", PARAMS).token_ids  # nothing stayed
    assert answers[1] == engine.generate([said("user", "w5")], PARAMS, chat_template_kwargs=QUIET).token_ids


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        (["enable_thinking"], "must be a mapping"),
        ({1: True}, "must be a mapping"),
        ({"tokenize": True}, "cannot set tokenize"),
        ({"add_generation_prompt": False}, "cannot set add_generation_prompt"),
    ],
)
def test_wrong_variables(engine: Engine, variables: Any, told: str) -> None:
    for ask in (engine.generate, engine.count_tokens):
        with pytest.raises(RequestError, match=told):
            ask("w5", chat_template_kwargs=variables)
    with pytest.raises(RequestError, match=told):
        engine.chat(chat_template_kwargs=variables)


def answer(events: Any) -> Result:
    *_, last = events
    assert isinstance(last, Finished)
    return last.result


def test_variables_hold_for_all_turns_of_a_chat(engine: Engine, tmp_path: Path) -> None:
    session = engine.chat(params=PARAMS, chat_template_kwargs=QUIET)
    first = answer(session.send("w5"))
    assert first.token_ids == engine.generate([20, 5, 22, 21], PARAMS).token_ids
    second = answer(session.send("w9"))
    assert second.prompt_tokens == 4 + first.tokens + len([22, 20, 9, 22, 21])
    session.rewind()
    session.save(tmp_path / "talk.json")
    again = Session.load(engine, tmp_path / "talk.json", chat_template_kwargs=QUIET)
    assert answer(again.send("w9")).token_ids == second.token_ids
    assert all(isinstance(message, Message) for message in again.messages)


def test_parameters_of_one_question(engine: Engine) -> None:
    session, short = engine.chat(params=PARAMS), sampling(0.0, 2)
    assert answer(session.send("w5", params=short)).tokens == 2
    assert answer(session.send("w5")).tokens == 6 and session.params == PARAMS
    assert answer(session.retry(params=short)).tokens == 2
    assert answer(session.edit("w9", params=short)).tokens == 2
    wrong: Any = {"max_tokens": 2}
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        answer(session.send("w5", params=wrong))
    assert len(session.messages) == 4
    for ask in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match="params must be SamplingParams"):
            ask(IDS, wrong)
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        engine.chat(params=wrong)


async def test_parameters_of_one_question_async(engine: Engine) -> None:
    session, short = engine.chat(params=PARAMS), sampling(0.0, 2)
    for events in (session.asend("w5", params=short), session.aretry(params=short)):
        assert answer([event async for event in events]).tokens == 2
    assert answer([event async for event in session.aedit("w5", params=short)]).tokens == 2


def test_message_of_a_prompt_that_is_too_long(engine: Engine) -> None:
    with pytest.raises(RequestError, match="load with a larger `context`"):
        engine.generate([5] * 256)
    with pytest.raises(RequestError, match="load with a larger `context`"):
        answer(engine.chat().send("w5 " * 256))
    assert engine.count_tokens([5] * 256) == 256  # which may be counted


def test_repr_of_an_engine(model: Path) -> None:
    with tiny_engine(model, "none", budget=1, resident=(0,)) as engine:
        shown = repr(engine)
        assert str(model) in shown and "1 resident, 2 on disk" in shown and "context 256" in shown
        assert repr(engine.chat()) == "<Session, 0 questions, 0 of 256 tokens>"
    assert repr(engine) == f"<Engine {model}, closed>"


def test_a_path_and_a_single_corpus_load(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("w5 w6 w7")
    draft = write_model(tmp_path / "draft", seed=1)
    with offspec.load(
        model, draft=[draft, "suffix"], corpus=str(text), dtype="float32", budget=8, width=2, learn=False
    ) as engine:
        assert engine.config.corpus == (text,) and engine.config.model == str(model)
        assert engine.sources[0] == str(draft)
        assert engine.generate(IDS, PARAMS).tokens == 6
        one, listed = (engine.generate(IDS, PARAMS, draft=named).draft for named in (draft, [draft]))
        assert one == listed
    wrong: Any = {"budget": 8}
    with pytest.raises(RequestError, match=r"an offspec\.Plan or the path"):
        offspec.load(model, plan=wrong)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_tokens", r"unknown option 'max_tokens': .* SamplingParams\(max_tokens=\.\.\.\)"),
        ("memory", r"unknown option 'memory': .* offspec\.load\(model, memory=\.\.\.\)"),
        ("speculative", "did you mean 'speculate'"),
    ],
)
def test_an_option_that_does_not_exist(engine: Engine, name: str, told: str) -> None:
    wrong: Any = {name: 4}
    for ask in (
        engine.generate,
        engine.stream,
        engine.submit,
        lambda text, **o: engine.generate_many([text], **o),
    ):
        with pytest.raises(TypeError, match=told):
            ask("w5", **wrong)
    assert engine.generate(IDS, PARAMS).tokens == 6


def test_many_prompts_are_a_list(engine: Engine) -> None:
    with pytest.raises(RequestError, match="not a single text: put the text in brackets"):
        engine.generate_many("w5 w9", PARAMS)
    wrong: Any = {"max_tokens": 4}
    with pytest.raises(RequestError, match="params must be SamplingParams"):
        engine.generate_many(["w5 w9"], wrong)
    (one,) = engine.generate_many([IDS], [PARAMS])
    assert one.token_ids == engine.generate(IDS, PARAMS).token_ids


def test_an_answer_is_asked_as_a_future_is(engine: Engine) -> None:
    answer = engine.submit(IDS, PARAMS)
    assert answer.result(timeout=60).tokens == 6
    assert answer.done() and not answer.cancelled() and answer.exception() is None
    assert not answer.cancel() and not answer.cancelled()
    left = engine.submit(IDS, replace(PARAMS, max_tokens=200))
    assert left.cancel() == left.cancelled()
    assert isinstance(left.exception(timeout=60), RequestError | None) and left.done()

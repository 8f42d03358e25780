"""Rules of requests change the target's tokens; speculation does not."""

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from offspec import Engine, RequestError, Result, SamplingParams, TextDelta
from tests.support.answers import PROMPT, TargetAndDrafts
from tests.support.tiny_models import tiny_engine

RULES: dict[str, dict[str, Any]] = {
    "bias": {"logit_bias": {7: 4.0, 11: -6.0, 30: 2.5}},
    "allowed": {"allowed_token_ids": range(3, 50)},
    "few allowed": {"allowed_token_ids": (8, 13)},
    "ngrams": {"no_repeat_ngram_size": 2, "allowed_token_ids": range(4, 14)},
    "bad words": {"bad_words": ["w7 w8", "w9", "w11 w12 w13"], "allowed_token_ids": range(5, 16)},
    "least": {"min_tokens": 20, "stop_token_ids": range(10, 60), "ignore_eos": False},
    "stops": {"stop_token_ids": range(40, 52)},
    "all": {
        "logit_bias": {7: 3.0},
        "no_repeat_ngram_size": 3,
        "bad_words": ["w8"],
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
        "stop_token_ids": (44,),
        "top_k": 40,
        "top_p": 0.95,
    },
}


@pytest.fixture(scope="module")
def engine(trio: TargetAndDrafts) -> Iterator[Engine]:
    with tiny_engine(trio.target, f"{trio.near},suffix", budget=32, width=8) as found:
        yield found


@pytest.fixture(scope="module")
def free(engine: Engine) -> tuple[int, ...]:
    """Tokens without a rule."""
    return engine.generate(PROMPT, params({}, 0.8)).token_ids


def params(rules: dict[str, Any], temperature: float) -> SamplingParams:
    given = {"max_tokens": 40, "ignore_eos": True, "seed": 4, "temperature": temperature}
    return SamplingParams(**(given | rules))


def holds(name: str, said: Result) -> bool:
    tokens, words = said.token_ids, said.text.split()
    text = [*PROMPT, *tokens]
    match name:
        case "few allowed":
            return set(tokens) <= {8, 13}
        case "ngrams":
            return len(set(pairwise(text))) == len(text) - 1
        case "bad words":
            return "w9" not in words and ("w7", "w8") not in set(pairwise(words))
        case "least":
            return len(tokens) >= 20 and said.finish_reason == "stop" and tokens[-1] in range(10, 60)
        case "stops":
            ended = said.finish_reason == "length" or tokens[-1] in range(40, 52)
            return ended and not set(tokens[:-1]) & set(range(40, 52))
        case _:
            return True


@pytest.mark.parametrize(("name", "temperature"), [*((name, 0.8) for name in RULES), ("all", 0.0)])
def test_speculation_changes_nothing(
    engine: Engine, free: tuple[int, ...], name: str, temperature: float
) -> None:
    result = engine.generate(PROMPT, params(RULES[name], temperature), check=True)
    assert result.mismatches == () and holds(name, result)
    assert result.token_ids != free, "the rule is felt"


def test_a_draft_that_does_not_see_the_noise(trio: TargetAndDrafts, engine: Engine) -> None:
    with tiny_engine(trio.target, trio.near, budget=16, width=4, verify="plain") as plain:
        for name in ("least", "all"):
            asked = params(RULES[name], 0.8)
            found = plain.generate(PROMPT, asked, check=True)
            assert found.mismatches == () and found.token_ids == engine.generate(PROMPT, asked).token_ids


def test_logprobs_come_with_events_and_results(engine: Engine) -> None:
    asked = params({"logprobs": 2}, 0.8)
    events = list(engine.stream(PROMPT, asked))
    alone = engine.generate(PROMPT, asked, speculate=False)
    found = [known for event in events if isinstance(event, TextDelta) for known in event.logprobs]
    assert alone.logprobs is not None and len(found) == 40
    assert [known.token for known in found] == list(alone.token_ids)
    for ours, theirs in zip(found, alone.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4) and ours.top[0][1] >= ours.logprob
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert engine.generate(PROMPT, params({}, 0.8)).logprobs is None
    told = alone.to_json()["logprobs"]
    for known, each in zip(alone.logprobs, told, strict=True):
        assert (each["token"], each["text"]) == (known.token, engine.decode_with_special([known.token]))
        assert [(top["token"], top["logprob"]) for top in each["top"]] == list(known.top)
        assert [top["text"] for top in each["top"]] == [
            engine.decode_with_special([token]) for token, _ in known.top
        ]
    assert json.loads(json.dumps(told)) == told


def test_tokens_beyond_the_vocabulary_are_an_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        engine.generate(PROMPT, params({"allowed_token_ids": (10**6,)}, 0.0))
    assert engine.generate(PROMPT, params({}, 0.0)).finish_reason == "length"

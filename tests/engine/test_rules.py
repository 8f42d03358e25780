"""Rules of a request change what the target says, and speculation changes nothing about it."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offspec import Engine, RequestError, SamplingParams, TextDelta
from tests.support.products import some
from tests.support.tiny_models import disturb, tiny_engine, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
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
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target", num_hidden_layers=3)
    near = write_model(folder / "near", num_hidden_layers=3)
    disturb(near)
    return target, near


@pytest.fixture(scope="module")
def engine(models: tuple[Path, Path]) -> Iterator[Engine]:
    target, near = models
    with tiny_engine(target, f"{near},suffix", budget=32, width=8) as found:
        yield found


def params(rules: dict[str, Any], temperature: float) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": 40, "ignore_eos": True, "seed": 4, "temperature": temperature} | rules)
    )


@pytest.fixture(scope="module")
def free(engine: Engine) -> Callable[[Sequence[int], float], tuple[int, ...]]:
    """What is said without a rule."""

    @cache
    def said(prompt: Sequence[int], temperature: float) -> tuple[int, ...]:
        return engine.generate(prompt, params({}, temperature)).token_ids

    return said


@pytest.mark.parametrize(
    ("name", "temperature"),
    some(
        [(name, temperature) for name in RULES for temperature in (0.0, 0.8)],
        *((name, 0.8) for name in ("all", "few allowed", "bad words", "stops", "least")),
        ("all", 0.0),
    ),
)
def test_speculation_changes_nothing(
    engine: Engine, free: Callable[[Sequence[int], float], tuple[int, ...]], name: str, temperature: float
) -> None:
    asked = params(RULES[name], temperature)
    for prompt in (tuple(PROMPT), (7, 8, 7, 8, 7)):
        result = engine.generate(prompt, asked, check=True)
        assert result.mismatches == ()
        assert result.token_ids != free(prompt, temperature), "the rule is felt"


@pytest.mark.parametrize("count", some([3, len(RULES)], 3))
def test_a_draft_that_does_not_see_the_noise(count: int, models: tuple[Path, Path], engine: Engine) -> None:
    target, near = models
    with tiny_engine(target, near, budget=16, width=4, verify="plain") as plain:
        for rules in list(RULES.values())[-count:]:
            asked = params(rules, 0.8)
            result = plain.generate(PROMPT, asked, check=True)
            assert result.mismatches == ()
            assert result.token_ids == engine.generate(PROMPT, asked).token_ids, (
                "no rule of verification shows"
            )


@pytest.mark.exhaustive
def test_what_rules_say_holds(engine: Engine) -> None:
    for temperature in (0.0, 0.8):
        said = {name: engine.generate(PROMPT, params(rules, temperature)) for name, rules in RULES.items()}
        assert set(said["few allowed"].token_ids) <= {8, 13}
        text = [*PROMPT, *said["ngrams"].token_ids]
        assert len(set(pairwise(text))) == len(text) - 1
        words = said["bad words"].text.split()
        assert "w9" not in words and ("w7", "w8") not in set(pairwise(words))
        assert len(said["least"].token_ids) >= 20 and said["least"].finish_reason == "stop"
        assert said["least"].token_ids[-1] in range(10, 60)
        stopped = said["stops"]
        if stopped.finish_reason == "stop":
            assert stopped.token_ids[-1] in range(40, 52)
            assert not set(stopped.token_ids[:-1]) & set(range(40, 52))


def test_logprobs_come_with_events_and_results(engine: Engine) -> None:
    asked = params({"logprobs": 2}, 0.8)
    events = list(engine.stream(PROMPT, asked))
    alone = engine.generate(PROMPT, asked, speculate=False)
    found = [known for event in events if isinstance(event, TextDelta) for known in event.logprobs]
    assert alone.logprobs is not None
    assert [known.token for known in found] == list(alone.token_ids)
    for ours, theirs in zip(found, alone.logprobs, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
    assert engine.generate(PROMPT, params({}, 0.8)).logprobs is None
    told = alone.to_json()["logprobs"]
    for known, each in zip(alone.logprobs, told, strict=True):
        assert (each["token"], each["text"]) == (known.token, engine.spell([known.token]))
        assert [(top["token"], top["logprob"]) for top in each["top"]] == list(known.top)
        assert [top["text"] for top in each["top"]] == [engine.spell([token]) for token, _ in known.top]
    assert json.loads(json.dumps(told)) == told
    assert len(found) == 40 and all(known.top[0][1] >= known.logprob for known in found)


def test_tokens_beyond_the_vocabulary_are_an_error(engine: Engine) -> None:
    with pytest.raises(RequestError, match="allowed_token_ids"):
        engine.generate(PROMPT, params({"allowed_token_ids": (10**6,)}, 0.0))
    assert engine.generate(PROMPT, params({}, 0.0)).finish_reason == "length"

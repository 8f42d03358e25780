"""Sampling defaults of a model, and options that override them."""

import json
from dataclasses import fields
from typing import Any

import pytest

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.sampling_defaults import SamplingOverrides, model_defaults, sampling_values

OWN = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
HINT = "the hint"


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_length": 4096, "temperature": None}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1}, {}),
        ({"do_sample": False, "temperature": "hot"}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20},
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
        ),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 1, "top_k": -1}, {"temperature": 1.0}),
        ({"top_p": 0.8, "min_p": 0.05}, {"temperature": 1.0, "top_p": 0.8, "min_p": 0.05}),
        ({"do_sample": True, "temperature": 0, "top_k": 50}, {"temperature": 0.0, "top_k": 50}),
        ({"repetition_penalty": 1.05}, {"temperature": 0.0, "repetition_penalty": 1.05}),
        (
            {"do_sample": True, "repetition_penalty": 1.05, "max_new_tokens": 5},
            {"temperature": 1.0, "repetition_penalty": 1.05},
        ),
    ],
)
def test_parameters_from_generation_config(generation: dict[str, Any], expected: dict[str, Any]) -> None:
    assert model_defaults(generation) == SamplingParams(**expected)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('"temperature": -1', "temperature must be 0 or above"),
        ('"temperature": NaN', "temperature must be 0 or above"),
        ('"temperature": Infinity', "temperature must be 0 or above"),
        ('"temperature": "0.6"', "temperature must be a number"),
        ('"temperature": true', "temperature must be a number"),
        (f'"temperature": 1{"0" * 400}', "temperature must be a number"),
        ('"top_p": 0', "top_p must be above 0"),
        ('"top_p": [0.9]', "top_p must be a number"),
        ('"top_k": 20.5', "top_k must be a whole number"),
        ('"top_k": -2', "top_k must be 0"),
        ('"min_p": 2', "min_p must be between 0 and 1"),
        ('"repetition_penalty": 0', "repetition_penalty must be above 0"),
        ('"do_sample": "yes"', "do_sample must be true or false, not 'yes'"),
    ],
)
def test_invalid_value_is_an_error(text: str, wrong: str) -> None:
    with pytest.raises(RequestError, match=wrong):
        model_defaults(json.loads(f'{{"eos_token_id": 2, {text}}}'))


def test_each_option_overrides_one_parameter() -> None:
    assert SamplingOverrides().apply_to(OWN) == OWN
    cooler = SamplingOverrides({"temperature": 0.2, "max_tokens": 5})
    assert cooler.apply_to(OWN) == SamplingParams(temperature=0.2, top_p=0.95, top_k=20, max_tokens=5)
    assert SamplingOverrides({"temperature": 0.0}).apply_to(OWN).greedy
    assert SamplingOverrides({"top_p": 0.5}, greedy=True).apply_to(OWN) == SamplingParams(top_p=0.5)
    fixed = SamplingParams(top_k=3, seed=1, stop=("END",))
    assert SamplingOverrides.all_of(fixed).apply_to(OWN) == fixed
    with pytest.raises(RequestError, match="top_p must be above 0"):
        SamplingOverrides({"top_p": 2})


def test_summary_names_the_source() -> None:
    assert SamplingOverrides().summary(SamplingParams(), HINT) == "temperature 0"
    assert SamplingOverrides({"top_p": 0.5}).summary(SamplingParams(), HINT) == "temperature 0, top_p 0.5"
    text = "temperature 0.6, top_p 0.95, top_k 20 (from generation_config.json); the hint"
    assert SamplingOverrides({"max_tokens": 5}).summary(OWN, HINT) == text
    assert SamplingOverrides({}, greedy=True).summary(OWN, HINT) == "temperature 0"
    text = "temperature 0.2, top_p 0.95, top_k 20 (from generation_config.json and options); the hint"
    assert SamplingOverrides({"temperature": 0.2}).summary(OWN, HINT) == text


def test_values_list_only_effective_parameters() -> None:
    assert sampling_values(SamplingParams(seed=3, top_p=1)) == {"temperature": 0.0}
    params = SamplingParams(temperature=0.5, presence_penalty=1)
    assert sampling_values(params) == {"temperature": 0.5, "presence_penalty": 1.0}
    names = {field.name for field in fields(SamplingParams)}
    assert sampling_values(OWN).keys() <= names

"""Parsing and formatting of sizes; accepted types of parameters and settings."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offspec import RequestError
from offspec.core.config import EngineConfig, SamplingParams, read_drafts
from offspec.core.values import parse_bytes
from offspec_planners.units import format_bytes


def test_parse_sizes() -> None:
    sizes = {"1.5GB": 1_500_000_000, "800MiB": 800 * 2**20, "12g": 12 * 10**9, "4096000": 4_096_000}
    assert {text: parse_bytes(text) for text in (*sizes, " 2 kb ")} == sizes | {" 2 kb ": 2000}


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.5 parsecs", "0", "1e9", "5iB"])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_bytes(text)


@pytest.mark.parametrize(("number", "meant"), [("12", "12GB"), (" 1.5", "1.5GB"), ("8192", "8192MB")])
def test_number_without_a_unit_suggests_one(number: str, meant: str) -> None:
    with pytest.raises(RequestError, match=rf"means {number.strip()} bytes; add a unit: {meant}$"):
        EngineConfig.of("m", {"vram": number})
    assert EngineConfig.of("m", {"vram": 12}).vram == 12


def test_an_error_of_a_size_speaks_of_no_memory() -> None:
    for size, error in (
        ("1", "a size of 1 means 1 byte; add a unit: 1GB"),
        ("much", "cannot read 'much' as a size; write it like 1.5GB or 800MiB"),
        (-1, "a size must be 0 or above, not -1"),
    ):
        with pytest.raises(RequestError, match=rf"^{error}$"):
            parse_bytes(size, least=0)


def test_conversation_cache_may_be_zero() -> None:
    for size, read in (("0GB", 0), (0, 0), ("1.5GB", 15 * 10**8), (7, 7)):
        assert EngineConfig.of("m", {"cache_size": size}).cache_size == read
    assert EngineConfig("m").cache_size == 0
    with pytest.raises(RequestError, match="above 0"):
        EngineConfig.of("m", {"memory": "0GB"})


def test_format_sizes() -> None:
    written = [format_bytes(n) for n in (0, 999, 1500, 2_500_000, 1_500_000_000, 3e12)]
    assert written == ["0 B", "999 B", "2 KB", "2.50 MB", "1.50 GB", "3.00 TB"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("temperature", "0.7", "a number, not '0.7'"),
        ("top_p", [0.9], "a number"),
        ("top_k", 1.5, "a whole number, not 1.5"),
        ("max_tokens", False, "a whole number"),
        ("seed", 1.0, "a whole number"),
        ("ignore_eos", "no", "True or False"),
        ("ignore_eos", 1, "True or False"),
        ("stop", 5, "a string or a list of strings"),
        ("stop", ["a", 5], "a string or a list of strings"),
        ("stop", {"a": 1}, "a string or a list of strings, not {'a': 1}"),
        ("bad_words", [None], "a string or a list of strings"),
        ("stop_token_ids", "56", "a list of token ids"),
        ("stop_token_ids", [5.5], "a list of token ids"),
        ("allowed_token_ids", {5: 1}, "a list of token ids"),
        ("logit_bias", [5, 6], "a mapping from token ids"),
        ("logit_bias", {5: "much"}, "a mapping from token ids"),
        ("logit_bias", {"five": 1.0}, "a mapping from token ids"),
        ("logit_bias", [(5, 1.0, 2)], "a mapping from token ids"),
        ("stop", ["x" * 500, 1], r"\.\.\.$"),
    ],
)
def test_parameters_of_wrong_types_are_refused(name: str, value: Any, told: str) -> None:
    with pytest.raises(RequestError, match=told) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} must be ") and len(str(caught.value)) < 150


def test_accepted_types_of_parameters() -> None:
    given: Any = {
        "temperature": np.float32(0.5),
        "top_k": np.int64(4),
        "top_p": 1,
        "stop": "END",
        "bad_words": None,
        "stop_token_ids": np.array([7, 8]),
        "allowed_token_ids": range(3),
        "logit_bias": {"13": 1, 5: -2.5},
    }
    params = SamplingParams(**given)
    assert params == SamplingParams(
        temperature=0.5,
        top_k=4,
        stop=("END",),
        stop_token_ids=(7, 8),
        allowed_token_ids=(0, 1, 2),
        logit_bias=((5, -2.5), (13, 1.0)),
    )
    assert [type(value) for value in (params.temperature, params.top_k, params.top_p)] == [float, int, float]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": 5}, "model must be a string"),
        ({"draft": 5}, "draft must be a string"),
        ({"budget": "64"}, "budget must be a whole number"),
        ({"memory": 1.5e9}, "memory must be a size"),
        ({"vram": True}, "vram must be a size"),
        ({"cache_size": "much"}, "cannot read 'much'"),
        ({"cache_size": -1}, "0 or above, not -1"),
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"learn": "yes"}, "learn must be True or False"),
        ({"corpus": [5]}, "corpus must be a path or a list"),
        ({"dtype": ["float32"]}, "dtype must be 'bfloat16' or 'float32'"),
    ],
)
def test_settings_of_wrong_types_are_refused(settings: Any, told: str) -> None:
    model: Any = settings.pop("model", "demo")
    with pytest.raises(RequestError, match=told):
        EngineConfig.of(model, settings)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("mem", "unknown setting 'mem': did you mean 'memory'?"),
        ("max_tokens", "engine.generate(prompt, SamplingParams(max_tokens=...))"),
        ("max_new_tokens", "did you mean 'max_tokens'? it is a sampling parameter of a request"),
        ("xyzzy", "unknown setting 'xyzzy': valid names are draft, draft_bits, memory"),
    ],
)
def test_unknown_setting(name: str, told: str) -> None:
    settings: Any = {"budget": 8, name: 5}
    with pytest.raises(TypeError, match=re.escape(told)):
        EngineConfig.of("m", settings)


def test_accepted_types_of_settings() -> None:
    int_of_numpy: Any = np.int64(5)
    config = EngineConfig.of(Path("a/b"), {"draft": Path("c"), "corpus": "d.txt", "memory": int_of_numpy})
    assert (config.model, config.draft, config.corpus, config.memory) == ("a/b", "c", (Path("d.txt"),), 5)
    several = EngineConfig.of("m", {"draft": [Path("c"), "suffix"], "corpus": [Path("d"), "e"]})
    assert (several.draft, several.corpus) == ("c,suffix", (Path("d"), Path("e")))


def test_errors_quote_the_beginning_of_a_long_value() -> None:
    wrong: Any = "x" * 100
    with pytest.raises(RequestError, match=r"budget must be .* not 'x{56}\.\.\.(;|$)"):
        EngineConfig.of("m", {"budget": wrong})


def test_former_name_of_the_self_draft() -> None:
    assert EngineConfig("demo", draft="substitute").draft == "self"
    assert EngineConfig("demo", draft="suffix, substitute") == EngineConfig("demo", draft="suffix,self")
    assert read_drafts("substitute,suffix") == ("self", "suffix")
    with pytest.raises(RequestError, match="names self twice"):
        EngineConfig("demo", draft="self,substitute")

"""Sampling defaults of a model's folder, as an engine reports them; greedy decoding in Python."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offspec.core.config import SamplingParams
from offspec.core.events import Event, Notice
from tests.support.tiny_models import tiny_engine, write_model

SAMPLES = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "top_k": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("sampled"), "llama")


def put(folder: Path, **generation: Any) -> Path:
    file = folder / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 2, **generation}))
    return file


def test_an_engine_reports_them_and_is_greedy_without_params(folder: Path) -> None:
    put(folder, **SAMPLES)
    heard = list[Event]()
    with tiny_engine(folder, "none", notify=heard.append) as engine:
        defaults = engine.sampling_defaults
        assert defaults == SamplingParams(temperature=2.0, top_p=0.95, top_k=64)
        assert engine.chat().params == SamplingParams()
        plain = engine.generate("w12 w13", SamplingParams(max_tokens=8))
        assert engine.generate("w12 w13").token_ids[:8] == plain.token_ids
        assert plain.sampling == {"temperature": 0.0}
        sampled = engine.generate("w12 w13", defaults)
        assert sampled.sampling == {"temperature": 2.0, "top_p": 0.95, "top_k": 64}
        assert sampled.to_json()["sampling"]["top_k"] == 64
    assert not any(isinstance(event, Notice) for event in heard)


def test_draft_and_sampling_defaults_give_the_same_tokens(folder: Path) -> None:
    put(folder, **SAMPLES)
    with tiny_engine(folder, "self") as drafted, tiny_engine(folder, "none") as alone:
        result = drafted.generate("w12 w13 w14", drafted.sampling_defaults)
        again = replace(alone.sampling_defaults, seed=result.seed)
        assert alone.generate("w12 w13 w14", again).token_ids == result.token_ids


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": "high"}, {"temperature": float("nan")}])
def test_an_invalid_config_is_ignored_with_one_notice(folder: Path, wrong: dict[str, Any]) -> None:
    file = put(folder, **{**SAMPLES, **wrong})
    heard = list[Event]()
    with tiny_engine(folder, "none", notify=heard.append) as engine:
        assert engine.sampling_defaults == SamplingParams()
    (notice,) = [event.text for event in heard if isinstance(event, Notice)]
    assert str(file) in notice and next(iter(wrong)) in notice and "\n" not in notice

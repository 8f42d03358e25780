"""Sampling parameters of requests that omit them: from the server's options, else from the model."""

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.sampling_defaults import SamplingOverrides
from offspec.engine.engine import Engine
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine

OWN = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
MESSAGES: Any = [{"role": "user", "content": "w12 w13 w14"}]
CHAT: Any = {"model": NAME, "messages": MESSAGES, "max_tokens": 12}


@pytest.fixture
def engine() -> ScriptedEngine:
    engine = ScriptedEngine()
    engine.sampling_defaults = OWN
    return engine


@pytest.fixture(scope="module")
def sampled(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A model with sampling settings of its own."""
    folder = tmp_path_factory.mktemp("sampled") / "model"
    shutil.copytree(tiny_folder, folder)
    generation = {"do_sample": True, "temperature": 2.0, "top_p": 0.95, "top_k": 64}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **generation}))
    with LiveServer(tiny_engine(folder)) as server:
        yield server


def answer(client: openai.OpenAI, **more: Any) -> str | None:
    text: str | None = client.chat.completions.create(**CHAT, **more).choices[0].message.content
    return text


def test_requests_use_the_models_defaults(sampled: LiveServer, alone: Engine) -> None:
    """With a seed, the tokens equal those of the same parameters in Python without a draft."""
    params = SamplingParams(temperature=2.0, top_p=0.95, top_k=64, max_tokens=12)
    greedy = alone.generate(MESSAGES, SamplingParams(max_tokens=12), speculate=False).text
    with sampled.client() as client:
        assert answer(client, temperature=0) == answer(client, temperature=0, seed=3) == greedy
        assert len({answer(client) for _ in range(4)}) > 1, "it is sampled without a seed"
        for given in ({}, {"temperature": 1.0}, {"top_p": 1.0}):
            expected = alone.generate(MESSAGES, replace(params, seed=3, **given), speculate=False)
            assert answer(client, seed=3, **given) == expected.text


@pytest.mark.parametrize(
    ("overrides", "given", "expected"),
    [
        (SamplingOverrides(), {}, OWN),
        (SamplingOverrides(), {"temperature": 0}, replace(OWN, temperature=0.0)),
        (SamplingOverrides(), {"top_p": 1}, replace(OWN, top_p=1.0)),
        (SamplingOverrides({"temperature": 0.2}), {}, replace(OWN, temperature=0.2)),
        (SamplingOverrides({"temperature": 0.2}), {"temperature": 1}, replace(OWN, temperature=1.0)),
        (SamplingOverrides({"temperature": 0.0}, greedy=True), {}, SamplingParams()),
        (SamplingOverrides(greedy=True), {"temperature": 0.7}, SamplingParams(temperature=0.7)),
    ],
)
def test_defaults_apply_to_every_api(
    engine: ScriptedEngine, overrides: SamplingOverrides, given: dict[str, Any], expected: SamplingParams
) -> None:
    with LiveServer(engine, sampling=overrides) as server, server.http() as http:
        for path, body in (
            ("chat/completions", {"messages": MESSAGES}),
            ("completions", {"prompt": "w12"}),
            ("responses", {"input": "w12"}),
            ("messages", {"messages": MESSAGES, "max_tokens": 5}),
        ):
            found = http.post(f"/v1/{path}", json={"model": NAME, **body, **given})
            assert found.status_code == 200, found.text
            params = engine.requests[-1].params
            assert replace(params, seed=None, max_tokens=256) == expected, path
            if path == "responses":
                entry = found.json()
                assert (entry["temperature"], entry["top_p"]) == (expected.temperature, expected.top_p)


def test_model_list_shows_defaults(engine: ScriptedEngine) -> None:
    own = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    with LiveServer(engine) as server, server.client() as client, server.anthropic() as other:
        (model,) = client.models.list().data
        assert model.model_dump()["default_sampling"] == own
        assert client.models.retrieve(NAME).model_dump()["default_sampling"] == own
        described: anthropic.types.ModelInfo = other.models.retrieve(NAME)
        assert described.model_dump()["default_sampling"] == own
    with LiveServer(engine, sampling=SamplingOverrides(greedy=True)) as server, server.http() as http:
        assert _listed(http)["default_sampling"] == {"temperature": 0.0}


def test_model_list_omits_defaults_while_loading(engine: ScriptedEngine) -> None:
    load = ScriptedLoad(engine)
    load.gate.clear()
    serving = LiveServer(lambda notify: load(engine.config, None, notify), ready=False)
    with serving as server, server.http() as http:
        assert "default_sampling" not in _listed(http)
        load.gate.set()


def _listed(http: httpx2.Client) -> dict[str, Any]:
    (model,) = http.get("/v1/models").json()["data"]
    assert isinstance(model, dict)
    return model


def test_log_shows_defaults(engine: ScriptedEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offspec.server")
    with LiveServer(engine):
        pass
    with LiveServer(engine, sampling=SamplingOverrides(greedy=True)):
        pass
    lines = [text for text in caplog.messages if text.startswith("sampling defaults: ")]
    own = "temperature 0.6, top_p 0.95, top_k 20 (from generation_config.json); `greedy` for temperature 0"
    assert lines == [f"sampling defaults: {own}", "sampling defaults: temperature 0"]

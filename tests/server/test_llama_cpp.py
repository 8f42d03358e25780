"""The API of llama.cpp's server, and the tokenizer over HTTP."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.engine.engine import Engine
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer

PROMPT = "w12 w13 w14"
OPTIONS = {"temperature": 0.8, "seed": 5, "n_predict": 8, "repeat_penalty": 1.2, "cache_prompt": True}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=8, repetition_penalty=1.2)


@pytest.fixture
def http(live: LiveServer) -> Iterator[httpx2.Client]:
    with live.http() as http:
        yield http


def events(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [json.loads(event.removeprefix("data: ")) for event in answer.text.strip().split("\n\n")]


def test_completion(http: httpx2.Client, alone: Engine) -> None:
    """The tokens equal the engine's, for text or ids, whole or streamed."""
    expected = alone.generate(PROMPT, PARAMS, raw=True, speculate=False)
    for prompt in (PROMPT, alone.encode(PROMPT, raw=True)):
        whole = http.post("/completion", json={"prompt": prompt, **OPTIONS}).json()
        assert (whole["content"], whole["tokens"]) == (expected.text, [*expected.token_ids])
        assert (whole["stop"], whole["stop_type"], whole["prompt"]) == (True, "limit", prompt)
        assert (whole["tokens_predicted"], whole["tokens_evaluated"]) == (8, 3)
        assert whole["generation_settings"] == {"seed": 5, "temperature": 0.8, "repeat_penalty": 1.2}
        assert whole["timings"]["predicted_n"] == 8 and whole["timings"]["predicted_per_second"] > 0
    *parts, last = events(http.post("/completion", json={"prompt": PROMPT, "stream": True, **OPTIONS}))
    assert "".join(part["content"] for part in parts) == expected.text
    assert [token for part in parts for token in part["tokens"]] == [*expected.token_ids]
    assert [part["stop"] for part in parts] == [False] * len(parts)
    assert (last["stop"], last["content"], last["tokens_predicted"]) == (True, "", 8)


def test_stop_strings_and_logit_bias(http: httpx2.Client, alone: Engine) -> None:
    first, second, *_ = alone.generate(PROMPT, SamplingParams(max_tokens=8), raw=True).token_ids
    fields: dict[str, Any] = {"prompt": PROMPT, "n_predict": 8, "temperature": 0}
    stopped = http.post("/completion", json=fields | {"stop": [f"w{second}"]}).json()
    assert (stopped["content"].strip(), stopped["stop_type"]) == (f"w{first}", "word")
    assert stopped["stopping_word"] == f"w{second}"
    never = http.post("/completion", json=fields | {"logit_bias": [[first, False]]}).json()
    assert never["tokens"][0] != first
    always = http.post("/completion", json=fields | {"logit_bias": {"40": 1000}}).json()
    assert always["tokens"] == [40] * 8
    silent = http.post("/completion", json=fields | {"n_predict": 0}).json()
    assert (silent["content"], silent["tokens_evaluated"]) == ("", 3)


def test_grammar_and_schema(served: LiveServer, engine: ScriptedEngine) -> None:
    engine.answers, grammar = ["w1"], 'root ::= "a" | "b"'
    with served.http() as http:
        for given, expected in (
            ({"grammar": grammar}, Constraint("grammar", grammar)),
            ({"json_schema": {"enum": [1]}}, Constraint("json_schema", '{"enum": [1]}')),
            ({"grammar": ""}, None),
        ):
            assert http.post("/completion", json={"prompt": "w1", **given}).json()["stop_type"] == "eos"
            assert engine.requests[-1].params.format == expected
        wrong = http.post("/completion", json={"prompt": "w1", "grammar": "root ::= ("})
        assert wrong.status_code == 400 and "grammar" in wrong.json()["error"]["message"]


def test_tokenize_and_detokenize(http: httpx2.Client, alone: Engine) -> None:
    ids = alone.encode(PROMPT, raw=True)
    plain = http.post("/tokenize", json={"content": PROMPT}).json()
    assert (plain["tokens"], plain["count"]) == (ids, 3)
    assert (
        http.post("/tokenize", json={"prompt": PROMPT, "model": NAME}).json()["tokens"] == ids
    )  # as in vLLM
    pieces = http.post("/tokenize", json={"content": "w12", "with_pieces": True}).json()["tokens"]
    assert pieces == [{"id": 12, "piece": "w12"}]
    text = http.post("/detokenize", json={"tokens": ids}).json()
    assert text["content"] == text["prompt"] == alone.decode_with_special(ids)
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == ("<bos>", "<eos>")
    assert info["chat_template"] == alone.model_info.chat_template


def test_server_information(http: httpx2.Client, alone: Engine) -> None:
    props = http.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 256
    assert (props["total_slots"], props["model_alias"]) == (1, NAME)
    assert props["chat_template"] == alone.model_info.chat_template
    assert http.get("/slots").json() == [{"id": 0, "n_ctx": 256, "is_processing": False}]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/completion", {}, 400, "prompt is missing"),
        ("/completion", {"prompt": []}, 400, "prompt"),
        ("/completion", {"prompt": "w1", "model": "other"}, 404, "'other' is not served"),
        ("/completion", {"prompt": "w1", "temperature": -1}, 400, "temperature"),
        ("/infill", {"input_prefix": "w1", "input_suffix": "w2"}, 400, "input_suffix"),
        ("/tokenize", {}, 400, "content is missing"),
        ("/detokenize", {"tokens": [96]}, 400, "ids must be from 0 to 95"),
    ],
)
def test_errors(http: httpx2.Client, path: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert message in error["message"]
    assert error["type"] == ("invalid_request_error" if status == 400 else "not_found_error")

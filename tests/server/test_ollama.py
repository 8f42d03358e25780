"""Ollama's API: lines of JSON, its own option names, and descriptions of the model."""

import json
import threading
from typing import Any

import httpx2
import pytest

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.engine.engine import Engine
from tests.server.answers import BOTH, TOOLS
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer
from tests.support.waiting import PATIENCE

CHAT, GENERATE = "/api/chat", "/api/generate"
ASKED: list[Any] = [{"role": "user", "content": "w12 w13 w14 w12 w13"}]
OPTIONS = {"temperature": 0.8, "seed": 5, "num_predict": 12, "num_ctx": 64, "top_k": 20}
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=12, top_k=20)


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Objects of a stream, split at every line end as clients do."""
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


@pytest.fixture
def http(live: LiveServer) -> Any:
    with live.http() as http:
        yield http


def test_chat(http: httpx2.Client, alone: Engine) -> None:
    """The tokens equal the engine's; the response is streamed unless `stream` is false."""
    expected = alone.generate(ASKED, PARAMS, speculate=False)
    fields = {"model": NAME, "messages": ASKED, "options": OPTIONS}
    *parts, last = lines(http.post(CHAT, json=fields))
    assert "".join(part["message"]["content"] for part in parts) == expected.text
    assert [part["done"] for part in parts] == [False] * len(parts) and len(parts) > 2
    whole = http.post(CHAT, json=fields | {"model": f"{NAME}:latest", "stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": expected.text}
    for end in (last, whole):
        assert (end["done"], end["done_reason"]) == (True, "length")
        assert end["prompt_eval_count"] == len(alone.encode(ASKED)) and end["eval_count"] == 12
        assert end["total_duration"] >= end["eval_duration"] > 0 and end["prompt_eval_duration"] > 0


def test_generate(http: httpx2.Client, alone: Engine) -> None:
    """One user message after the system message; or raw text."""
    system = {"role": "system", "content": "w15"}
    expected = alone.generate([system, *ASKED], PARAMS, speculate=False).text
    fields = {"model": NAME, "prompt": ASKED[0]["content"], "system": "w15", "options": OPTIONS}
    *parts, last = lines(http.post(GENERATE, json=fields))
    assert "".join(part["response"] for part in parts) == expected
    assert last["done_reason"] == "length" and last["response"] == ""
    raw = http.post(GENERATE, json=fields | {"raw": True, "stream": False}).json()
    assert raw["response"] == alone.generate(ASKED[0]["content"], PARAMS, raw=True, speculate=False).text


def test_options(served: LiveServer, engine: ScriptedEngine) -> None:
    """Options map to `SamplingParams`; -1 means a random seed and no limit."""
    engine.answers = ["w1"]
    options = {"repeat_penalty": 1.2, "num_predict": -1, "seed": -1, "stop": ["x", "y"], "min_p": 0.1}
    with served.http() as http:
        for _ in range(2):
            answer = http.post(
                CHAT, json={"model": NAME, "messages": ASKED, "options": options | {"mirostat": 1}}
            )
            assert answer.headers["x-offspec-ignored"] == "options.mirostat"
    first, second = (fields.params for fields in engine.requests[-2:])
    assert (first.repetition_penalty, first.stop, first.min_p) == (1.2, ("x", "y"), 0.1)
    assert first.max_tokens > 10**9 and first.seed != second.seed


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_and_calls(served: LiveServer, engine: ScriptedEngine, stream: bool) -> None:
    engine.answers = [BOTH]
    fields = {"model": NAME, "messages": ASKED, "tools": TOOLS, "think": True, "stream": stream}
    with served.http() as http:
        answer = http.post(CHAT, json=fields)
    found = [part["message"] for part in (lines(answer) if stream else [answer.json()])]
    assert "".join(part.get("thinking", "") for part in found) == "Which city? Oslo."
    assert "".join(part["content"] for part in found) == "I look."
    calls = [call["function"] for part in found for call in part.get("tool_calls", ())]
    assert calls == [
        {"index": 0, "name": "weather", "arguments": {"city": "Oslo"}},
        {"index": 1, "name": "time", "arguments": {"city": "Rome"}},
    ]
    assert engine.template_given is not None and engine.template_given["enable_thinking"] is True
    with served.http() as http:
        http.post(CHAT, json=fields | {"think": "low"})
    assert engine.template_given["reasoning_effort"] == "low"


def test_tool_results_get_call_ids(served: LiveServer, engine: ScriptedEngine) -> None:
    """Some templates need ids, which Ollama's clients do not send."""
    engine.answers, given = ["w1"], list[Any]()
    calls = [{"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in ("weather", "time")]
    messages = [
        *ASKED,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "noon", "tool_name": "time"},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "lost", "tool_name": "other"},
    ]
    encode = engine.encode
    engine.encode = lambda prompt, *more: given.extend(prompt) or encode(prompt, *more)  # type: ignore
    try:
        with served.http() as http:
            assert http.post(CHAT, json={"model": NAME, "messages": messages}).status_code == 200
    finally:
        del engine.encode
    _, said, noon, rain, lost = given
    assert said["reasoning_content"] == "Hm."
    weather, time = (call["id"] for call in said["tool_calls"])
    assert (noon["tool_call_id"], rain["tool_call_id"], len(time)) == (time, weather, 9)
    assert (noon["name"], rain["name"], lost["name"]) == ("time", "weather", "other")
    assert "tool_call_id" not in lost


def test_formats(served: LiveServer, engine: ScriptedEngine) -> None:
    engine.answers, schema = ["w1"], {"enum": [12, 13]}
    fields = {"model": NAME, "messages": ASKED, "stream": False}
    with served.http() as http:
        for format, expected in (
            (schema, Constraint("json_schema", json.dumps(schema))),
            ("json", Constraint("json_object")),
            ("", None),
        ):
            assert http.post(CHAT, json=fields | {"format": format}).status_code == 200
            assert engine.requests[-1].params.format == expected
        for wrong, message in (("xml", "format: it must be"), ({"not": {}}, "format: the json schema")):
            answer = http.post(CHAT, json=fields | {"format": wrong})
            assert answer.status_code == 400 and message in answer.json()["error"]


def test_logprobs(http: httpx2.Client, alone: Engine) -> None:
    params = SamplingParams(max_tokens=3, logprobs=2)
    known = alone.generate(ASKED, params).logprobs
    assert known is not None
    fields = {"model": NAME, "messages": ASKED, "logprobs": True, "top_logprobs": 2}
    fields["options"] = {"num_predict": 3}
    whole = http.post(CHAT, json=fields | {"stream": False}).json()["logprobs"]
    assert [each["token"] for each in whole] == [token.text for token in known]
    assert [each["logprob"] for each in whole] == pytest.approx([token.logprob for token in known], abs=1e-5)
    assert [len(each["top_logprobs"]) for each in whole] == [2] * 3
    parts = lines(http.post(CHAT, json=fields))
    assert [each["token"] for part in parts for each in part.get("logprobs", ())] == [
        token.text for token in known
    ]


def test_load_requests(http: httpx2.Client) -> None:
    chat = http.post(CHAT, json={"model": NAME, "messages": [], "keep_alive": 0}).json()
    assert (chat["message"]["content"], chat["done"], chat["done_reason"]) == ("", True, "load")
    generate = http.post(GENERATE, json={"model": NAME}).json()
    assert (generate["response"], generate["done_reason"]) == ("", "load")


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (CHAT, {"model": "other", "messages": ASKED}, 404, "the model 'other' is not served here"),
        ("/api/show", {"model": "other:latest"}, 404, "the model 'other'"),
        (CHAT, {"messages": [ASKED[0] | {"images": ["aGk="]}]}, 400, "messages[0].images"),
        (CHAT, {"messages": [{"role": "robot"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": ASKED, "options": {"temperature": -1}}, 400, "temperature"),
        (CHAT, {"messages": [ASKED[0] | {"content": "w12 " * 300}]}, 400, "the prompt is too long"),
        (GENERATE, {"prompt": "w12", "images": ["aGk="]}, 400, "images"),
        (GENERATE, {"prompt": "w12", "template": "{{ .Prompt }}"}, 400, "template"),
        (GENERATE, {"prompt": "w12", "suffix": "w13"}, 400, "suffix"),
        ("/api/pull", {"model": "llama3"}, 404, "unknown path /api/pull"),
    ],
)
def test_errors(http: httpx2.Client, path: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"] and message in answer.json()["error"]


def test_error_within_a_stream(served: LiveServer, engine: ScriptedEngine) -> None:
    engine.answers = [Script("w1 " * 20, fail_after=1)]
    with served.http() as http:
        first, *_, last = lines(http.post(CHAT, json={"model": NAME, "messages": ASKED}))
    assert first["message"]["content"] and list(last) == ["error"]


def test_model_description(http: httpx2.Client, served: LiveServer, alone: Engine) -> None:
    info = alone.model_info
    (model,) = http.get("/api/tags").json()["models"]
    assert (model["name"], model["size"]) == (f"{NAME}:latest", info.nbytes) and len(model["digest"]) == 64
    assert model["details"]["family"] == "llama" and model["details"]["quantization_level"] == "F32"
    (running,) = http.get("/api/ps").json()["models"]
    assert (running["name"], running["context_length"]) == (f"{NAME}:latest", 256)
    shown = http.post("/api/show", json={"name": f"{NAME}:latest"}).json()
    assert shown["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": info.parameters,
        "llama.context_length": 256,
    }
    assert (shown["capabilities"], shown["template"]) == (
        ["completion", *["tools"] * info.tools],
        info.chat_template,
    )
    with served.http() as other:
        shown = other.post("/api/show", json={"model": NAME}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    major, minor, _ = http.get("/api/version").json()["version"].split(".")
    assert (int(major), int(minor)) >= (0, 6)
    assert http.head("/").status_code == 200


def test_while_the_model_is_loading() -> None:
    engine, go_on = ScriptedEngine(), threading.Event()

    def load(notify: Any) -> ScriptedEngine:
        go_on.wait(PATIENCE)
        return engine

    with LiveServer(load, ready=False) as server, server.http() as http:
        (model,) = http.get("/api/tags").json()["models"]
        assert (model["name"], http.get("/api/ps").json()) == (f"{NAME}:latest", {"models": []})
        answer = http.post(GENERATE, json={"model": NAME})
        assert answer.status_code == 503 and "loading" in answer.json()["error"]
        go_on.set()

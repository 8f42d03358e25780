"""Structured outputs with OpenAI's own client: valid, equal to the engine's tokens, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.engine.engine import Engine
from offspec.server.structured_outputs import checked_constraint
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.tokenizers import byte_level, saved

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "mat"]}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
# Reasoning and calls are marked as in Qwen's models; if enabled, the prompt opens the reasoning.
TEMPLATE = (
    "{% if tools %}cat {% endif %}{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    "{% if enable_thinking %}<think>\n{% endif %}{# </think> <tool_call> #}"
)
ASKED: list[Any] = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer can spell JSON."""
    tokenizer = byte_level()
    folder = write_model(
        tmp_path_factory.mktemp("spelling"), num_hidden_layers=2, vocab_size=tokenizer.get_vocab_size()
    )
    saved(tokenizer, folder, chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with tiny_engine(folder, "none") as engine:
        yield engine


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(tiny_engine(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: LiveServer) -> Iterator[openai.OpenAI]:
    with served.client() as client:
        yield client


def test_json_schema(client: openai.OpenAI, engine: Engine) -> None:
    fields: Any = {
        **{"model": NAME, "messages": ASKED, "max_tokens": 60, "temperature": 1.0, "seed": 3},
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    }
    (choice,) = client.chat.completions.create(**fields).choices
    found = json.loads(choice.message.content or "")
    assert found["kind"] in ("cat", "mat") and 3 <= found["age"] <= 99 and len(found) == 2
    assert choice.finish_reason == "stop"
    format = Constraint("json_schema", SCHEMA)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, format=format)
    assert choice.message.content == engine.generate(ASKED, params, speculate=False).text
    chunks = client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_vllm_formats(client: openai.OpenAI) -> None:
    formats: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "(cat|mat) sat"}, ("cat sat", "mat sat")),
        ({"grammar": 'start: "cat" | "mat"'}, ("cat", "mat")),
        ({"json": {"enum": [1, 2]}}, ("1", "2")),
    ]
    for format, wanted in formats:
        given: Any = {"model": NAME, "max_tokens": 40, "extra_body": {"structured_outputs": format}}
        (choice,) = client.chat.completions.create(**given, messages=ASKED).choices
        assert choice.message.content in wanted
        assert client.completions.create(**given, prompt="the cat").choices[0].text in wanted


def test_schema_that_only_its_closed_form_can_enforce() -> None:
    """Two objects of `oneOf` exclude each other if neither may have further properties."""
    objects = [
        {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab"
    ]
    assert checked_constraint("schema", "json_schema", {"oneOf": objects}).kind == "json_schema"


def test_required_tool_call(client: openai.OpenAI) -> None:
    """Its arguments match the schema, including references."""
    cities = {"city": {"$ref": "#/$defs/city"}}
    parameters = {"properties": cities, "required": ["city"], "additionalProperties": False}
    parameters["$defs"] = {"city": {"enum": ["Oslo", "Rome"]}}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    fields: Any = {"model": NAME, "messages": ASKED, "temperature": 1.0, "seed": 3}
    answer = client.chat.completions.create(**fields, tools=tools, tool_choice="required", max_tokens=200)
    (made,) = answer.choices[0].message.tool_calls or [None]
    assert made is not None and made.type == "function" and made.function.name == "weather"
    assert json.loads(made.function.arguments)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason == "tool_calls"


PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_schema_applies_to_the_answer_not_the_reasoning(
    served: LiveServer, path: str, stream: bool, thinks: bool
) -> None:
    """In all APIs; the reasoning ends in time for the answer."""
    kind = {"type": "json_schema", "schema": SCHEMA}
    fields: dict[str, dict[str, Any]] = {
        PATHS[0]: {
            "messages": ASKED,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
        PATHS[1]: {"input": "the cat", "text": {"format": kind}},
        PATHS[2]: {"messages": ASKED, "output_config": {"format": kind}},
    }
    given = {**fields[path], "temperature": 1.0, "chat_template_kwargs": {"enable_thinking": thinks}}
    limit = "max_output_tokens" if path == PATHS[1] else "max_tokens"
    with served.http() as http:
        for seed in range(4):
            body = {"model": NAME, **given, limit: 120, "seed": seed, "stream": stream}
            thought, answer = _said(http.post(path, json=body).text, stream)
            value = json.loads(answer)
            assert value["kind"] in ("cat", "mat") and 3 <= value["age"] <= 99
            assert bool(thought) == thinks


def _said(text: str, stream: bool) -> tuple[str, str]:
    """Reasoning and text of an answer of any API."""
    if not stream:
        body = json.loads(text)
        if "choices" in body:
            message = body["choices"][0]["message"]
            return message.get("reasoning_content", ""), message["content"]
        parts = body.get("content") or [each for item in body["output"] for each in item["content"]]
        thought = "".join(part.get("thinking", "") for part in parts)
        thought += "".join(part["text"] for part in parts if part["type"] == "reasoning_text")
        return thought, "".join(part["text"] for part in parts if part["type"] in ("text", "output_text"))
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    thought = "".join(delta.get("reasoning_content", "") for delta in deltas)
    answer = "".join(delta.get("content") or "" for delta in deltas)
    for event in events:
        delta = event.get("delta")
        match event.get("type"):
            case "response.output_text.delta":
                answer += delta
            case "response.reasoning_text.delta":
                thought += delta
            case "content_block_delta":
                answer, thought = answer + delta.get("text", ""), thought + delta.get("thinking", "")
    return thought, answer


@pytest.mark.parametrize("thinks", [False, True])
def test_required_tool_call_after_reasoning(client: openai.OpenAI, thinks: bool) -> None:
    tools: Any = [{"type": "function", "function": {"name": "describe", "parameters": SCHEMA}}]
    extra = {"chat_template_kwargs": {"enable_thinking": thinks}}
    for seed in range(3):
        fields: Any = {"model": NAME, "messages": ASKED, "temperature": 1.0, "seed": seed, "tools": tools}
        answer = client.chat.completions.create(
            **fields, tool_choice="required", max_tokens=200, extra_body=extra
        )
        (made,) = answer.choices[0].message.tool_calls or [None]
        assert made is not None and made.type == "function"
        assert json.loads(made.function.arguments)["kind"] in ("cat", "mat")
        assert bool(answer.choices[0].message.to_dict().get("reasoning_content")) == thinks

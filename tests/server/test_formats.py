"""Answers of a format, by OpenAI's own client: valid, the engine's own tokens, streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.engine.engine import Engine
from tests.support.live_server import NAME, LiveServer
from tests.support.tiny_models import tiny_engine, write_model
from tests.support.tokenizers import byte_level, saved

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "mat"]}, "age": {"type": "integer", "minimum": 3, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
ASKED: list[Any] = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer can spell JSON."""
    tokenizer = byte_level()
    folder = write_model(
        tmp_path_factory.mktemp("spelling"), num_hidden_layers=2, vocab_size=tokenizer.get_vocab_size()
    )
    saved(tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with tiny_engine(folder, "none") as engine:
        yield engine


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with LiveServer(tiny_engine(folder)) as server, server.client() as client:
        yield client


def test_a_schema_is_followed(client: openai.OpenAI, engine: Engine) -> None:
    asked: Any = {
        **{"model": NAME, "messages": ASKED, "max_tokens": 60, "temperature": 1.0, "seed": 3},
        "response_format": {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}},
    }
    (choice,) = client.chat.completions.create(**asked).choices
    found = json.loads(choice.message.content or "")
    assert found["kind"] in ("cat", "mat") and 3 <= found["age"] <= 99 and len(found) == 2
    assert choice.finish_reason == "stop"
    format = Constraint("json_schema", SCHEMA)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60, format=format)
    assert choice.message.content == engine.generate(ASKED, params, speculate=False).text
    chunks = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content


def test_formats_of_vllm(client: openai.OpenAI) -> None:
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


def test_a_call_that_must_come(client: openai.OpenAI) -> None:
    """With arguments of its schema, references in it followed."""
    cities = {"city": {"$ref": "#/$defs/city"}}
    parameters = {"properties": cities, "required": ["city"], "additionalProperties": False}
    parameters["$defs"] = {"city": {"enum": ["Oslo", "Rome"]}}
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    asked: Any = {"model": NAME, "messages": ASKED, "temperature": 1.0, "seed": 3}
    answer = client.chat.completions.create(**asked, tools=tools, tool_choice="required", max_tokens=200)
    (made,) = answer.choices[0].message.tool_calls or [None]
    assert made is not None and made.type == "function" and made.function.name == "weather"
    assert json.loads(made.function.arguments)["city"] in ("Oslo", "Rome")
    assert answer.choices[0].finish_reason == "tool_calls"

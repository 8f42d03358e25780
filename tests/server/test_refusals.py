"""Unsupported fields are refused by name, and no body crashes the server."""

import json
import logging
import random
from typing import Any

import openai
import pytest

from tests.server.bodies import CHAT, IMAGE, LEAST, MESSAGES, RESPONSES, TEXT, TOOL, USER, VALID
from tests.support.live_server import NAME, LiveServer

# Changes of a body, and the field that the error names.
REFUSED: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    CHAT: [
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [USER | {"role": "robot"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": " "}]}, None),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 257}, "stop"),
        ({"bad_words": ["x"] * 257}, "bad_words"),
        ({"logit_bias": {"cat": 1}}, "logit_bias"),
        ({"logit_bias": {"96": 1}}, "logit_bias"),
        ({"logit_bias": {"12": 1e300}}, "logit_bias"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"presence_penalty": 1e300}, "presence_penalty"),
        ({"stop_token_ids": [5, 400]}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"offspec": {"trees": True}}, "offspec.trees"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"name": "x"}]}},
            },
            "tool_choice",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ],
    TEXT: [
        ({"suffix": "w12"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": ["w12", 13]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["w12", ""]}, None),
        ({"prompt": [12, 9999]}, None),
    ],
    MESSAGES: [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "robot", "content": "w12"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"temperature": -1.0}, "temperature"),
    ],
    RESPONSES: [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"content": "w12"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_unsupported_fields_are_refused(live: LiveServer, path: str) -> None:
    with live.http() as http:
        for given, field in REFUSED[path]:
            answer = http.post(path, json={"model": NAME, **LEAST[path], **given})
            reported = answer.json()["error"]
            assert (answer.status_code, reported["type"]) == (400, "invalid_request_error"), given
            assert path == MESSAGES or reported["param"] == field, given
            assert field is None or field.split("[")[0] in reported["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_fills_the_context(client: openai.OpenAI, stream: bool) -> None:
    """Streamed or not, the status refuses it before any byte of an answer."""
    messages: Any = [{"role": "user", "content": "w12 " * 300}]
    with pytest.raises(
        openai.BadRequestError, match="prompt is too long: 302 tokens > 255 maximum"
    ) as refused:
        client.chat.completions.create(model=NAME, messages=messages, stream=stream)
    assert refused.value.code == "context_length_exceeded"


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "w12"}])
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_fields_without_effect(client: openai.OpenAI) -> None:
    """Fields without effect, and values that state the default behaviour."""
    extra = {
        "user": "me",
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "temperature": None,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = {"model": NAME, "messages": [USER], "max_tokens": 1, **extra}
    answer: Any = client.post(CHAT.removeprefix("/v1"), body=body, cast_to=object)
    assert answer["usage"]["completion_tokens"] == 1


JUNK: list[Any] = [None, True, -1, 2**70, 1e308, "", "\ud800", "x" * 2000, [[]], {"a": {"b": [None]}}, "\0"]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _mutated(body: Any, dice: random.Random) -> bytes:
    """Return a body with one value changed, removed or renamed, or with some bytes of its text changed."""
    data = json.loads(json.dumps(body))
    *path, key = dice.choice(_places(data)[1:])
    holder = data
    for each in path:
        holder = holder[each]
    match dice.randrange(4):
        case 0:
            del holder[key]
        case 1 | 2:
            holder[key] = dice.choice(JUNK)
        case 3 if isinstance(holder, dict):
            holder[f"{key}_"] = holder.pop(key)
    text = bytearray(json.dumps(data).encode())
    if dice.random() < 0.3:
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(text))
            text[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
    return bytes(text[: dice.randrange(len(text))] if dice.random() < 0.1 else text)


def test_malformed_bodies(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """Mutations of valid bodies; those that stay valid are answered."""
    dice = random.Random(20)
    statuses = dict[int, int]()
    with live.http() as http, caplog.at_level(logging.WARNING):
        for _ in range(500):
            path, body = dice.choice([*VALID.items()])
            content = _mutated({"model": NAME, **body}, dice)
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            assert answer.status_code == 200 or ("Traceback" not in answer.text and "error" in answer.json())
        for path, body in VALID.items():
            assert http.post(path, json={"model": NAME, **body}).status_code == 200
    assert statuses[400] > 80 and statuses[200] > 16
    assert not caplog.records


NOT_JSON = {
    "nothing": b"",
    "lists nested too deeply": b"[" * 200_000,
    "objects nested too deeply": b'{"messages": ' * 100_000,
    "bytes that are no text": b"\xff\xfe{}",
    "null": b"null",
    "a list": b"[]",
    "half a character": b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "infinity": b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": 1e999}',
    "no number": b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
}


@pytest.mark.parametrize("kind", NOT_JSON)
def test_body_is_not_json(live: LiveServer, kind: str) -> None:
    with live.http() as http:
        answer = http.post(CHAT, content=NOT_JSON[kind], headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

"""What is not supported is refused by name, and no body brings the server down."""

import json
import logging
import random
from typing import Any

import openai
import pytest

from tests.support.live_server import NAME, LiveServer

CHAT, TEXT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
USER: dict[str, Any] = {"role": "user", "content": "w12"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
IMAGE = {"type": "image", "source": {}}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    TEXT: {"prompt": "w12"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    RESPONSES: {"input": "w12"},
}
# What is changed in a body, and the field that is named.
REFUSED: dict[str, list[tuple[dict[str, Any], str | None]]] = {
    CHAT: [
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"verbosity": "low"}, "verbosity"),
        ({"colour": "red"}, "colour"),
        ({"messages": [USER | {"mood": "good"}]}, "messages[0].mood"),
        ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [USER | {"role": "robot"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": " "}]}, None),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
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
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"offspec": {"trees": True}}, "offspec.trees"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
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
        ({"echo": True}, "echo"),
        ({"suffix": "w12"}, "suffix"),
        ({"best_of": 4}, "best_of"),
        ({"prompt": ["w12", 13]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["w12", ""]}, None),
        ({"prompt": [12, 9999]}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
    MESSAGES: [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "robot", "content": "w12"}]}, "messages[0].role"),
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web", "input_schema": {}}]}, "tools[0].type"),
        ({"tools": [{"name": "a", "input_schema": {}, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"temperature": -1.0}, "temperature"),
        ({"foo": 1}, "foo"),
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
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"stop": ["w12"]}, "stop"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"foo": 1}, "foo"),
    ],
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_refused(live: LiveServer, path: str) -> None:
    with live.http() as http:
        for given, field in REFUSED[path]:
            answer = http.post(path, json={"model": NAME, **LEAST[path], **given})
            told = answer.json()["error"]
            assert (answer.status_code, told["type"]) == (400, "invalid_request_error"), given
            assert path == MESSAGES or told["param"] == field, given
            assert field is None or field.split("[")[0] in told["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_without_room(client: openai.OpenAI, stream: bool) -> None:
    """Streamed or not, it is refused by its status, before any byte of an answer."""
    messages: Any = [{"role": "user", "content": "w12 " * 300}]
    with pytest.raises(openai.BadRequestError, match="the context has room for 256") as refused:
        client.chat.completions.create(model=NAME, messages=messages, stream=stream)
    assert refused.value.code == "context_length_exceeded"


def test_another_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "w12"}])
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")


def test_harmless_fields(client: openai.OpenAI) -> None:
    """Those without effect, and values that say what is done anyway."""
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


CALL = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {
        "messages": [
            {"role": "system", "content": "w15"},
            {"role": "user", "content": [{"type": "text", "text": "w12 w13"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "w19", "tool_call_id": "c"},
        ],
        **{"max_tokens": 1, "temperature": 0.5, "seed": 3, "n": 1, "stop": ["w40"], "stream": False},
        **{"logit_bias": {"12": 1.5}, "logprobs": True, "top_logprobs": 1},
        **{"tools": [TOOL], "tool_choice": "auto"},
    },
    TEXT: {"prompt": ["w12"], "max_tokens": 1, "logprobs": 1, "stop_token_ids": [*range(96)]},
    MESSAGES: {
        "system": [{"type": "text", "text": "w15"}],
        "messages": [
            {"role": "user", "content": "w12"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "w13", "signature": "x"},
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "w14"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "w15"}]},
        ],
        **{"max_tokens": 1, "stop_sequences": ["w40"], "thinking": {"type": "enabled", "budget_tokens": 9}},
        "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"},
    },
    RESPONSES: {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "w12"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w13"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "w15"},
        ],
        **{"instructions": "w15", "max_output_tokens": 1, "store": False, "reasoning": {"effort": "low"}},
        **{"text": {"format": {"type": "text"}}, "include": ["message.output_text.logprobs"]},
        "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
    },
}
JUNK: list[Any] = [None, True, -1, 2**70, 1e308, "", "\ud800", "x" * 2000, [[]], {"a": {"b": [None]}}, "\0"]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _mutated(body: Any, dice: random.Random) -> bytes:
    """A body of which one thing is another, gone or renamed, or of whose text some bytes are."""
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
    """Derived from valid ones; those that are still valid are answered."""
    dice = random.Random(20)
    statuses = dict[int, int]()
    with live.http() as http, caplog.at_level(logging.WARNING):
        for _ in range(160):
            path, body = dice.choice([*VALID.items()])
            content = _mutated({"model": NAME, **body}, dice)
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            assert ("Traceback" not in answer.text and "error" in answer.json()) or answer.status_code == 200
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
def test_what_is_no_body(live: LiveServer, kind: str) -> None:
    with live.http() as http:
        answer = http.post(CHAT, content=NOT_JSON[kind], headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

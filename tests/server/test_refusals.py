"""What is not supported is refused by name, and no body brings the server down."""

import json
import logging
import random
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.support.live_server import NAME, LiveServer

USER: dict[str, Any] = {"role": "user", "content": "w12"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"store": True}, "store"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
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
        (
            {"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
        ),
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
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, given: dict[str, Any], field: str | None) -> None:
    body = {"model": NAME, "messages": [USER], **given}
    with pytest.raises(openai.BadRequestError) as refused:
        client.post(CHAT.removeprefix("/v1"), body=body, cast_to=object)
    assert refused.value.param == field
    assert field is None or field.split("[")[0] in refused.value.message


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
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "store": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "temperature": None,
        "logit_bias": None,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    body = {"model": NAME, "messages": [USER], "max_tokens": 1, **extra}
    answer: Any = client.post(CHAT.removeprefix("/v1"), body=body, cast_to=object)
    assert answer["usage"]["completion_tokens"] == 1


VALID: list[tuple[str, dict[str, Any]]] = [
    (
        CHAT,
        {
            "model": NAME,
            "messages": [
                {"role": "system", "content": "w15"},
                {"role": "user", "content": [{"type": "text", "text": "w12 w13"}]},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "content": "w19", "tool_call_id": "c"},
            ],
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "temperature": 0.5,
            "seed": 3,
            "n": 1,
            "stop": ["w40"],
            "logit_bias": {"12": 1.5},
            "logprobs": True,
            "top_logprobs": 1,
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream": False,
        },
    ),
    (
        TEXT,
        {"model": NAME, "prompt": ["w12"], "max_tokens": 1, "logprobs": 1, "stop_token_ids": [*range(96)]},
    ),
    (
        "/v1/messages",
        {
            "model": NAME,
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
            "max_tokens": 1,
            "stop_sequences": ["w40"],
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "auto"},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
    ),
    (
        "/v1/responses",
        {
            "model": NAME,
            "instructions": "w15",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "w12"}]},
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "w13"}]},
                {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "a", "output": "w15"},
            ],
            "max_output_tokens": 1,
            "store": False,
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
            "include": ["message.output_text.logprobs"],
            "tools": [{"type": "function", "name": "weather", "parameters": {"type": "object"}}],
            "tool_choice": "auto",
        },
    ),
]
JUNK: list[Any] = [
    None,
    True,
    -1,
    2**70,
    1e308,
    "",
    "\ud800",
    "x" * 2000,
    [],
    {},
    [[]],
    {"a": {"b": [None]}},
    "\x00",
]


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything within a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in _places(each, (*path, key)))]


def _mutated(body: Any, dice: random.Random) -> bytes:
    """A body of which one thing is another, gone or doubled, or of whose text some bytes are."""
    data = json.loads(json.dumps(body))
    path = dice.choice(_places(data)[1:])
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    match dice.randrange(5):
        case 0:
            del holder[path[-1]]
        case 1 | 2:
            holder[path[-1]] = dice.choice(JUNK)
        case 3 if isinstance(holder, dict):
            holder[f"{path[-1]}_"] = holder.pop(path[-1])
        case 3:
            holder[path[-1]] = holder
    text = bytearray(json.dumps(_uncircled(data)).encode())
    if dice.random() < 0.3:
        for _ in range(dice.randrange(1, 4)):
            at = dice.randrange(len(text))
            text[at : at + dice.randrange(3)] = dice.randbytes(dice.randrange(3))
    return bytes(text[: dice.randrange(len(text))] if dice.random() < 0.1 else text)


def _uncircled(value: Any, above: tuple[int, ...] = ()) -> Any:
    if id(value) in above:
        return "around"
    above = (*above, id(value))
    if isinstance(value, dict):
        return {key: _uncircled(each, above) for key, each in value.items()}
    return [_uncircled(each, above) for each in value] if isinstance(value, list) else value


@pytest.mark.exhaustive
def test_malformed_bodies(live: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    """Derived from valid ones; those that are still valid are answered."""
    dice = random.Random(20)
    statuses = dict[int, int]()
    with live.http() as http, caplog.at_level(logging.WARNING):
        for _ in range(500):
            path, body = dice.choice(VALID)
            content = _mutated(body, dice)
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), (content, answer.text)
            assert ("Traceback" not in answer.text and "error" in answer.json()) or answer.status_code == 200
        for path, body in VALID:
            assert http.post(path, json=body).status_code == 200
    assert statuses[400] > 250 and statuses[200] > 50
    assert not caplog.records


NOT_JSON: list[Callable[[], bytes]] = [
    lambda: b"",
    lambda: b"[" * 200_000,
    lambda: b'{"a":' * 100_000,
    lambda: b'{"messages": ' + b"[" * 100_000,
    lambda: b"\xff\xfe{}",
    lambda: b"null",
    lambda: b"[]",
    lambda: b'"x"',
    lambda: b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
    lambda: b'{"model": "tiny", "messages": [{"role": "user", "content": "w12"}], "temperature": 1e999}',
    lambda: b'{"model": "tiny", "messages": [{"role": "user", "content": "w12"}], "temperature": NaN}',
]


@pytest.mark.parametrize("make", NOT_JSON)
def test_what_is_no_body(live: LiveServer, make: Callable[[], bytes]) -> None:
    with live.http() as http:
        answer = http.post(CHAT, content=make(), headers={"content-type": "application/json"})
        assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"

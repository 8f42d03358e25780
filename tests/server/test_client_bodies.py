"""Request bodies as coding agents, editors and front ends send them."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.bodies import CHAT, LEAST, MESSAGES, RESPONSES, TEXT, VALID
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer

SHELL = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}},
    "required": ["command"],
}
PATCH = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin" /(.|\\n)+/'}
FUNCTION = {"type": "function", "name": "shell", "strict": False, "parameters": SHELL}
CODEX: dict[str, Any] = {
    "instructions": "You write code.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Show the files."}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "aGk="},
        {"type": "function_call", "name": "shell", "arguments": '{"command": ["ls"]}', "call_id": "a"},
        {"type": "function_call_output", "call_id": "a", "output": "a.txt"},
        {"type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin x", "call_id": "b"},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search"}},
    ],
    "tools": [
        FUNCTION,
        {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": PATCH},
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "files", "description": "More tools.", "tools": [FUNCTION]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "text": {"verbosity": "low"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "client_metadata": {"session": "s"},
}
CLAUDE: dict[str, Any] = {
    "max_tokens": 8,
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "system": [
        {"type": "text", "text": "Billing."},
        {
            "type": "text",
            "text": "You write code.",
            "cache_control": {"type": "ephemeral", "scope": "global"},
        },
    ],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": ""},
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                {"type": "tool_use", "id": "a", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "a",
                    "content": [
                        {"type": "text", "text": "a.txt"},
                        {"type": "tool_reference", "tool_name": "Read"},
                    ],
                }
            ],
        },
        {"role": "system", "content": "Be brief."},
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
            "eager_input_streaming": True,
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"name": "Late", "input_schema": {"type": "object"}, "defer_loading": True},
    ],
}
USER = {"role": "user", "content": "w12"}
THOUGHT = {"role": "assistant", "content": "w13", "reasoning": "w14"}
# Path, fields of the body, and the fields that the response lists as ignored.
SHAPES: list[tuple[str, dict[str, Any], str]] = [
    (
        RESPONSES,
        CODEX,
        "input.action, tools.external_web_access, input (web_search_call), tools (web_search)",
    ),
    (
        MESSAGES,
        CLAUDE,
        "messages.content.content.tool_name, tools.max_uses, "
        "content (server_tool_use), content (tool_reference), tools (web_search_20250305)",
    ),
    (CHAT, {"messages": [USER, THOUGHT, USER]}, ""),
    (CHAT, {"messages": [USER, THOUGHT | {"reasoning_details": [{"type": "reasoning.text"}]}, USER]}, ""),
    (CHAT, {"messages": [USER | {"id": "m1", "mood": "good"}]}, "messages.mood"),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None}, USER]}, ""),
    (
        CHAT,
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]},
        "",
    ),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "w1", "cache_control": {}}]}]},
        "",
    ),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "input_text", "text": "w1"}]}]}, ""),
    (CHAT, {"keep_alive": "5m", "prompt_cache_key": "k", "client_metadata": {}, "verbosity": "low"}, ""),
    (
        CHAT,
        {"prediction": {"type": "content", "content": "x"}, "web_search_options": {}},
        "web_search_options",
    ),
    (CHAT, {"thinking": {"type": "disabled"}, "reasoning": {"effort": "none", "exclude": True}}, ""),
    (
        CHAT,
        {"temperature": None, "stop": [], "tools": [], "functions": [], "logit_bias": None, "n": None},
        "",
    ),
    (CHAT, {"stream_options": {"include_usage": True}, "top_logprobs": 1, "allowed_token_ids": []}, ""),
    (CHAT, {"max_tokens": -1, "max_completion_tokens": 2}, ""),
    (CHAT, {"max_completion_tokens": 0, "max_tokens": 2}, ""),
    (CHAT, {"colour": "red", "x\r\ny": {"a": 1}}, "colour, x??y"),
    (CHAT, {"model": ""}, ""),
    (CHAT, {"temperature ": 1, " ": 2}, "temperature, ?"),
    (
        RESPONSES,
        {
            "tools": [FUNCTION, {"type": "web_search"}],
            "tool_choice": {"type": "allowed_tools", "tools": [FUNCTION, {"type": "web_search"}]},
        },
        "tools (web_search)",
    ),
    (
        CHAT,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
                {"role": "function", "name": "f", "content": "w15"},
            ]
        },
        "",
    ),
    (TEXT, {"best_of": 1, "user": "u", "cache_prompt": True}, "cache_prompt"),
    (MESSAGES, {"container": None, "mcp_servers": [], "speed": "fast", "betas": ["x"]}, ""),
    (MESSAGES, {"mcp_servers": [{"type": "url", "url": "http://x"}]}, "mcp_servers"),
    (RESPONSES, {"truncation": "auto", "max_tool_calls": 3, "stop": ["w40"], "top_logprobs": None}, ""),
    (RESPONSES, {"input": [{"role": "assistant", "content": []}, {"role": "user", "content": "w1"}]}, ""),
]


@pytest.fixture(scope="module")
def strict() -> Iterator[LiveServer]:
    with LiveServer(ScriptedEngine(["w1"]), strict=True) as server:
        yield server


@pytest.mark.parametrize("path", LEAST)
def test_client_bodies_are_answered(served: LiveServer, engine: ScriptedEngine, path: str) -> None:
    engine.answers = ["w1"]
    with served.http() as http:
        for given_path, given, ignored in SHAPES:
            if given_path == path:
                answer = http.post(path, json={"model": NAME, **LEAST[path], **given})
                assert answer.status_code == 200, (given, answer.text)
                assert answer.headers.get("x-offspec-ignored", "") == ignored, given


def test_stream_lists_ignored_fields(served: LiveServer) -> None:
    with served.http() as http:
        answer = http.post(CHAT, json={"model": NAME, "messages": [USER], "stream": True, "colour": 1})
    assert answer.headers["x-offspec-ignored"] == "colour"


def test_ignored_fields_are_logged_once(served: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with served.http() as http, caplog.at_level(logging.INFO, "offspec.server"):
        for _ in range(2):
            http.post(CHAT, json={"model": NAME, "messages": [USER | {"shade": 1}, USER | {"shade": 2}]})
    found = [record.getMessage() for record in caplog.records if "shade" in record.getMessage()]
    assert found == [f"ignored a field that has no effect: messages.shade ({CHAT})"]


def test_unknown_fields_in_strict_mode(strict: LiveServer) -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        (CHAT, {"colour": "red"}, "colour"),
        (CHAT, {"verbosity": "low"}, "verbosity"),
        (CHAT, {"messages": [USER, USER | {"mood": "good"}]}, "messages[1].mood"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (TEXT, {"cache_prompt": True}, "cache_prompt"),
        (RESPONSES, {"context_management": [{"type": "x"}]}, "context_management"),
        (RESPONSES, {"tools": [FUNCTION | {"defer_loading": True}]}, "tools[0].defer_loading"),
    ]
    with strict.http() as http:
        for path, given, field in refused:
            answer = http.post(path, json={"model": NAME, **LEAST[path], **given})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
        answer = http.post(MESSAGES, json={"model": NAME, **CLAUDE})
        assert answer.status_code == 400 and "thinking.display" in answer.json()["error"]["message"]
        for path, body in VALID.items():
            answer = http.post(path, json={"model": NAME, **body, "user": "u"})
            assert answer.status_code == 200, answer.text


def test_unknown_fields_are_never_refused(served: LiveServer, engine: ScriptedEngine) -> None:
    """Fields of any name and value, anywhere in bodies of every API: 500 bodies."""
    engine.answers = ["w1"]
    dice = random.Random(41)
    bodies = [*VALID.items(), (RESPONSES, CODEX), (MESSAGES, CLAUDE)]
    with served.http() as http:
        for at in range(500):
            path, body = dice.choice(bodies)
            data = json.loads(json.dumps(body))
            holder = dice.choice([*_structs(data)])
            holder[f"unknown_{at}"] = dice.choice([None, True, -1, "x", [[]], {"a": {"b": [None]}}])
            answer = http.post(path, json={"model": NAME, **data})
            assert answer.status_code == 200, (data, answer.text)


def _structs(value: Any, name: str = "") -> Iterator[dict[str, Any]]:
    """Objects of a body whose fields are an API's, and not a user's own."""
    if isinstance(value, dict):
        if name not in ("parameters", "input_schema", "logit_bias", "input", "arguments"):
            yield value
            for key, each in value.items():
                yield from _structs(each, key)
    elif isinstance(value, list):
        for each in value:
            yield from _structs(each, "" if name == "input" else name)

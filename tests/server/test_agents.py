"""Features of requests that only coding agents use."""

import json
import logging
from typing import Any

import pytest

from offspec.server import reply
from tests.server.bodies import CHAT, LEAST, MESSAGES, RESPONSES
from tests.support.fake_engine import ScriptedEngine
from tests.support.live_server import NAME, LiveServer

Events = list[dict[str, Any]]
EMPTY: dict[str, Any] = {"type": "object", "properties": {}}
PICTURE = "data:image/png;base64,aGk="
SPACES: list[dict[str, Any]] = [
    {"type": "function", "name": "add", "parameters": EMPTY},
    {
        "type": "namespace",
        "name": "mcp__calc",
        "description": "Computes.",
        "tools": [
            {"type": "function", "name": "add", "parameters": EMPTY},
            {"type": "custom", "name": "solve", "description": "Solves."},
        ],
    },
]


def post(server: LiveServer, path: str, **body: Any) -> tuple[dict[str, Any], str]:
    """Return the response to a body, and the fields that the server ignored."""
    with server.http() as http:
        answer = http.post(path, json={"model": NAME, **LEAST[path], **body})
    assert answer.status_code == 200, answer.text
    return answer.json(), answer.headers.get("x-offspec-ignored", "")


def prompt(engine: ScriptedEngine) -> str:
    """Text of the last prompt."""
    return engine.decode_with_special(engine.requests[-1].prompt)


@pytest.mark.parametrize(
    ("name", "arguments", "item"),
    [
        ("add", {}, {"type": "function_call", "name": "add", "arguments": "{}"}),
        (
            "mcp__calc__add",
            {},
            {"type": "function_call", "namespace": "mcp__calc", "name": "add", "arguments": "{}"},
        ),
        (
            "mcp__calc__solve",
            {"input": "x=1"},
            {"type": "custom_tool_call", "namespace": "mcp__calc", "name": "solve", "input": "x=1"},
        ),
    ],
)
def test_namespaced_tools(
    served: LiveServer, engine: ScriptedEngine, name: str, arguments: dict[str, Any], item: dict[str, Any]
) -> None:
    engine.answers = [f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"]
    answer, ignored = post(served, RESPONSES, tools=SPACES)
    assert ignored == "" and engine.template_given is not None
    shown = [tool["function"]["name"] for tool in engine.template_given["tools"]]
    assert shown == ["add", "mcp__calc__add", "mcp__calc__solve"]
    (called,) = answer["output"]
    assert {field: called.get(field) for field in item} == item
    assert ("namespace" in called) == ("namespace" in item)


@pytest.mark.parametrize("namespace", [None, "mcp__calc", "mcp__calc__"])
def test_earlier_calls_keep_the_models_name(
    served: LiveServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch, namespace: str | None
) -> None:
    seen, encode = list[Any](), engine.encode

    def recorded(messages: Any, *more: Any) -> list[int]:
        seen.extend(messages)
        return encode(messages, *more)

    monkeypatch.setattr(engine, "encode", recorded)
    call = {"type": "function_call", "name": "add", "namespace": namespace, "arguments": "{}", "call_id": "a"}
    result = {"type": "function_call_output", "call_id": "a", "output": "3"}
    post(served, RESPONSES, input=[{"role": "user", "content": "Add."}, call, result], tools=SPACES)
    (made,) = seen[1]["tool_calls"]
    assert made["function"]["name"] == ("mcp__calc__add" if namespace else "add")


def test_claude_code_billing_line_is_removed_from_prompt(served: LiveServer, engine: ScriptedEngine) -> None:
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0da;"},
        {"type": "text", "text": "You write code."},
    ]
    post(served, MESSAGES, system=system)
    assert prompt(engine).startswith("<|system|>You write code.")
    post(served, MESSAGES, system=system[:1])
    assert "billing" not in prompt(engine) and "<|system|>" not in prompt(engine)


def test_too_long_prompt_is_logged(
    served: LiveServer, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Agents replace the error by messages of their own, which do not name a remedy."""
    with caplog.at_level(logging.INFO, "offspec.server"), served.http() as http:
        answer = http.post(RESPONSES, json={"model": NAME, "input": "word " * 2 * engine.context})
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert [each for each in caplog.messages if each.startswith("refused: the prompt is too long: ")]


def test_waiting_responses_stream_sends_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex ends a stream without an event for some minutes; a comment is not an event."""
    monkeypatch.setattr(reply, "_KEEP_ALIVE_S", 0.02)
    engine, events = ScriptedEngine(), Events()
    engine.gate.clear()
    body = {"model": NAME, "input": "Why?", "stream": True}
    with (
        LiveServer(engine) as server,
        server.http() as http,
        http.stream("POST", RESPONSES, json=body) as answer,
    ):
        for line in answer.iter_lines():
            if line.startswith("data: "):
                events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 5:
                engine.gate.set()
    assert [each["type"] for each in events[:5]] == ["response.created", *["response.in_progress"] * 4]
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    assert all(each["response"] == events[0]["response"] for each in events[:5])
    assert events[-1]["type"] == "response.completed"


RESULTS: list[tuple[str, dict[str, Any], str]] = [
    (
        CHAT,
        {
            "messages": [
                {"role": "user", "content": "Look."},
                {
                    "role": "tool",
                    "tool_call_id": "a",
                    "content": [{"type": "image_url", "image_url": {"url": PICTURE}}],
                },
            ]
        },
        "image_url",
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "Look."},
                {
                    "type": "function_call_output",
                    "call_id": "a",
                    "output": [{"type": "input_image", "image_url": PICTURE}],
                },
            ]
        },
        "input_image",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "a",
                            "content": [{"type": "image", "source": {"type": "base64", "data": "aGk="}}],
                        }
                    ],
                }
            ]
        },
        "image",
    ),
    (
        MESSAGES,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": "PDF file read"},
                        {"type": "document", "source": {"type": "base64", "data": "aGk="}},
                    ],
                }
            ]
        },
        "document",
    ),
]


@pytest.mark.parametrize(("path", "body", "kind"), RESULTS)
def test_images_in_tool_results_are_omitted(
    served: LiveServer, engine: ScriptedEngine, path: str, body: dict[str, Any], kind: str
) -> None:
    """Agents send all results again with each request, so a refusal would end the conversation."""
    _, ignored = post(served, path, **body)
    assert f"content ({kind})" in ignored
    assert f"[{kind} omitted: this model reads text only]" in prompt(engine)

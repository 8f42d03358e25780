"""Anthropic's Messages API with Anthropic's own client: blocks, events, tools, reasoning and errors."""

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from offspec.core.config import SamplingParams
from offspec.core.errors import StreamError
from offspec.engine.engine import Engine
from tests.server.answers import BOTH, PARAMETERS
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer

ASKED: Any = {"model": NAME, "max_tokens": 100, "messages": [{"role": "user", "content": "w12 w13 w14"}]}
TOOLS: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("weather", "time")]


@pytest.fixture
def scripted(served: LiveServer, engine: ScriptedEngine) -> Iterator[anthropic.Anthropic]:
    engine.answers = [BOTH]
    with served.anthropic() as client:
        yield client


@pytest.fixture
def client(live: LiveServer) -> Iterator[anthropic.Anthropic]:
    with live.anthropic() as client:
        yield client


def blocks(message: anthropic.types.Message) -> list[Any]:
    """Content of a message, without ids."""
    return [block.model_dump(exclude_none=True, exclude={"id"}) for block in message.content]


def test_answers_equal_the_engines(client: anthropic.Anthropic, alone: Engine) -> None:
    given = {"temperature": 0.8, "seed": 5, "ignore_eos": True, "top_k": 9}
    expected = alone.generate(ASKED["messages"], SamplingParams(max_tokens=20, **given), speculate=False)
    fields = {**ASKED, "max_tokens": 20, "extra_body": given}
    whole = client.messages.create(**fields)
    assert blocks(whole) == [{"type": "text", "text": expected.text}]
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", NAME, "max_tokens")
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.prompt_tokens
    assert usage.output_tokens == 20
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == expected.text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)
    assert final.usage.cache_read_input_tokens == expected.prompt_tokens - 1


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
    ],
)
def test_chat_template_arguments(
    scripted: anthropic.Anthropic, engine: ScriptedEngine, fields: dict[str, Any], template: dict[str, Any]
) -> None:
    scripted.messages.create(**ASKED, extra_body=fields)
    assert (engine.template_given or {}) == template


def test_stream_events(scripted: anthropic.Anthropic) -> None:
    """Events arrive in order, each of the client's own type."""
    events = list(scripted.messages.create(**ASKED, tools=TOOLS, stream=True))
    assert all(type(event).model_validate(event.model_dump()) == event for event in events)
    order = [event.type for event in events]
    assert (order[0], order[-2:]) == ("message_start", ["message_delta", "message_stop"])
    starts = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    opened = -1
    for event in events:
        match event.type:
            case "content_block_start":
                assert event.index == opened + 1
                opened = event.index
            case "content_block_delta" | "content_block_stop":
                assert event.index == opened
    assert order.count("content_block_stop") == 4


def test_tools_and_reasoning(scripted: anthropic.Anthropic) -> None:
    expected = [
        {"type": "thinking", "thinking": "Which city? Oslo.", "signature": "unsigned"},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "name": "time", "input": {"city": "Rome"}},
    ]
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    whole = scripted.messages.create(**ASKED, tools=TOOLS, thinking=thinking)
    assert blocks(whole) == expected and whole.stop_reason == "tool_use"
    assert whole.usage.output_tokens_details is not None
    assert whole.usage.output_tokens_details.thinking_tokens >= 3
    with scripted.messages.stream(**ASKED, tools=TOOLS) as stream:
        final = stream.get_final_message()
    assert blocks(final) == expected
    choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
    assert blocks(scripted.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)) == expected[:3]
    bare = scripted.messages.create(**ASKED, tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in bare.content] == ["thinking", "text"] and bare.stop_reason == "end_turn"


def test_response_formats_and_forced_calls(scripted: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    schema = {"type": "object", "properties": {"sky": {"const": "blue"}}}
    engine.answers = ['{"sky": "blue"}']
    format: Any = {"format": {"type": "json_schema", "schema": schema}}
    answer = scripted.messages.create(**ASKED, output_config=format)
    assert blocks(answer) == [{"type": "text", "text": '{"sky": "blue"}'}]
    given = engine.requests[-1].params.format
    assert given is not None and json.loads(given.text) == {**schema, "additionalProperties": False}
    engine.answers = ['{"name": "time", "arguments": {"city": "Rome"}}']
    choices: list[Any] = [{"type": "any"}, {"type": "tool", "name": "time"}]
    for choice in choices:
        answer = scripted.messages.create(**ASKED, tools=TOOLS, tool_choice=choice)
        assert blocks(answer) == [{"type": "tool_use", "name": "time", "input": {"city": "Rome"}}]
        assert engine.requests[-1].params.format is not None


def test_models(scripted: anthropic.Anthropic) -> None:
    """The list has the format of the client's API, though OpenAI's uses the same path."""
    page = scripted.models.list()
    (model,) = page.data
    assert (model.id, model.type, model.display_name) == (NAME, "model", NAME)
    assert not page.has_more and page.first_id == page.last_id == NAME
    assert scripted.models.retrieve(NAME) == model and type(model).model_validate(model.model_dump())
    assert abs(model.created_at.timestamp() - time.time()) < 1000
    with pytest.raises(anthropic.NotFoundError) as caught:
        scripted.models.retrieve("claude")
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "not_found_error"


def test_conversation_with_tools(client: anthropic.Anthropic, alone: Engine) -> None:
    """The template renders it like the same conversation in OpenAI's format."""
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "w15"}, {"type": "text", "text": "w16"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "w17", "signature": "unsigned"},
                {"type": "text", "text": "w18"},
                {"type": "tool_use", "id": "a", "name": "w19", "input": {"city": "Oslo"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "w20"}]},
                {"type": "text", "text": "w21", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    called = {"name": "w19", "arguments": {"city": "Oslo"}}
    plain = [
        {"role": "system", "content": "w30"},
        {"role": "user", "content": "w15\nw16"},
        {"role": "assistant", "content": "w18", "tool_calls": [{"function": called}]},
        {"role": "tool", "content": "w20"},
        {"role": "user", "content": "w21"},
    ]
    expected = alone.generate(plain, SamplingParams(max_tokens=5), speculate=False)
    given: Any = {"model": NAME, "messages": messages, "system": [{"type": "text", "text": "w30"}]}
    answer = client.messages.create(**given, max_tokens=5)
    assert blocks(answer) == [{"type": "text", "text": expected.text}]
    assert client.messages.count_tokens(**given).input_tokens == expected.prompt_tokens


def test_stop_sequences(client: anthropic.Anthropic, alone: Engine) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)
    said = alone.generate(ASKED["messages"], params, speculate=False).text.split()
    stop = next(word for word in said[4:] if len(word) == 3 and word not in said[:4])
    extra = {"seed": 3, "ignore_eos": True, "temperature": 1.0}
    answer = client.messages.create(**ASKED, stop_sequences=["w999", stop], extra_body=extra)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert blocks(answer)[0]["text"].split() == said[: said.index(stop)]


def test_prefilled_answer_is_continued(client: anthropic.Anthropic, alone: Engine) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", "content": "w30 w31"}]
    expected = alone.generate(messages, SamplingParams(max_tokens=5), speculate=False).text
    answer = client.messages.create(model=NAME, max_tokens=5, messages=messages)
    assert blocks(answer) == [{"type": "text", "text": expected}]


def test_empty_answer(scripted: anthropic.Anthropic, engine: ScriptedEngine) -> None:
    engine.answers = [""]
    answer = scripted.messages.create(**ASKED)
    assert (answer.content, answer.stop_reason) == ([], "end_turn")


def test_errors_of_every_status(
    served: LiveServer, scripted: anthropic.Anthropic, engine: ScriptedEngine
) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        scripted.messages.create(**{**ASKED, "model": "claude"})
    long: Any = [{"role": "user", "content": "a " * 9000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4095 maximum"):
        scripted.messages.create(**{**ASKED, "messages": long})
    assert scripted.messages.count_tokens(model=NAME, messages=long).input_tokens > 9000
    engine.answers = [Script("one two three four five six", fail_after=1)]
    with pytest.raises(anthropic.InternalServerError, match="was aborted"):
        scripted.messages.create(**ASKED)
    with pytest.raises(anthropic.APIStatusError) as caught:
        list(scripted.messages.create(**ASKED, stream=True))
    assert isinstance(caught.value.body, dict) and caught.value.body["error"]["type"] == "api_error"
    engine.answers = [Script("one", fail_after=0, error=StreamError("x", file="f", offset=0))]
    with pytest.raises(anthropic.InternalServerError, match="aborted by an error: see the server's log"):
        scripted.messages.create(**ASKED)

"""Tools and reasoning in Chat Completions with OpenAI's own client: scripted answers, parsed and streamed."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from offspec.core.config import SamplingParams
from offspec.core.events import TextDelta
from offspec.engine.engine import Engine
from tests.server.answers import BOTH, TOOLS, call
from tests.support.fake_engine import Script, ScriptedEngine
from tests.support.live_server import NAME, LiveServer

ASKED: Any = {"model": NAME, "messages": [{"role": "user", "content": "How is Oslo?"}], "tools": TOOLS}


@pytest.fixture
def client(served: LiveServer, engine: ScriptedEngine) -> Iterator[openai.OpenAI]:
    engine.answers = [BOTH]
    with served.client() as client:
        yield client


def test_calls_and_reasoning_of_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    (choice,) = answer.choices
    message = choice.message
    assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert message.model_extra is not None and message.model_extra["reasoning_content"] == "Which city? Oslo."
    found = [(made.type, made.function.name, json.loads(made.function.arguments)) for made in calls(message)]
    assert found == [("function", "weather", {"city": "Oslo"}), ("function", "time", {"city": "Rome"})]
    assert all(len(made.id) == 9 and made.id.isalnum() for made in calls(message))
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert 3 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= 8


def test_calls_and_reasoning_streamed(client: openai.OpenAI) -> None:
    text, thought, names, arguments, reasons = "", "", dict[int, str](), dict[int, str](), []
    for chunk in client.chat.completions.create(**ASKED, stream=True):
        (choice,) = chunk.choices
        delta = choice.delta
        text += delta.content or ""
        thought += (delta.model_extra or {}).get("reasoning_content", "")
        reasons.append(choice.finish_reason)
        for made in delta.tool_calls or ():
            assert made.function is not None
            names[made.index] = names.get(made.index, "") + (made.function.name or "")
            arguments[made.index] = arguments.get(made.index, "") + (made.function.arguments or "")
    assert (text, thought, reasons[-1]) == ("I look.", "Which city? Oslo.", "tool_calls")
    assert names == {0: "weather", 1: "time"}
    assert [json.loads(each) for each in arguments.values()] == [{"city": "Oslo"}, {"city": "Rome"}]


def test_tool_choice_none(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**ASKED, "tool_choice": "none"})
    message, reason = answer.choices[0].message, answer.choices[0].finish_reason
    assert message.tool_calls is None and reason == "stop"
    assert message.content == BOTH.partition("</think>\n\n")[2]


def test_malformed_calls_are_text(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    text = '<tool_call>{"name": "weather", "arguments": </tool_call>'
    engine.answers = [text]
    (choice,) = client.chat.completions.create(**ASKED).choices
    assert (choice.message.content, choice.finish_reason) == (text, "stop")


def test_answer_cut_off_within_a_call(client: openai.OpenAI, engine: ScriptedEngine) -> None:
    engine.answers = [Script(call("weather", "Oslo"), pass_tokens=1)]
    (choice,) = client.chat.completions.create(**ASKED, max_tokens=3).choices
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert choice.message.content and call("weather", "Oslo").startswith(choice.message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_required_call(client: openai.OpenAI, engine: ScriptedEngine, choice: Any) -> None:
    engine.answers = ['{"name": "time", "arguments": {"city": "Rome"}}']
    (found,) = client.chat.completions.create(**ASKED, tool_choice=choice).choices
    (made,) = calls(found.message)
    assert (made.function.name, made.function.arguments) == ("time", '{"city": "Rome"}')
    assert (found.message.content, found.finish_reason) == (None, "tool_calls")
    format = engine.requests[-1].params.format
    assert format is not None and format.kind == "json_schema"
    names = [each["properties"]["name"]["const"] for each in json.loads(format.text)["anyOf"]]
    assert names == (["weather", "time"] if choice == "required" else ["time"])


def test_options_incompatible_with_a_required_call(client: openai.OpenAI) -> None:
    fields: Any = {**ASKED, "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match="another format"):
        client.chat.completions.create(**fields, response_format={"type": "json_object"})
    sizes = [{"$ref": "#/$defs/size", "$defs": {"size": {"type": kind}}} for kind in ("string", "integer")]
    tools = [{"type": "function", "function": {"name": f"t{at}", "parameters": sizes[at]}} for at in (0, 1)]
    with pytest.raises(openai.BadRequestError, match="name one tool"):
        client.chat.completions.create(**{**fields, "tools": tools})


@pytest.mark.parametrize("stream", [False, True])
def test_parallel_tool_calls_disabled(client: openai.OpenAI, engine: ScriptedEngine, stream: bool) -> None:
    """Text after the first call is not part of the answer, though the model would generate it."""
    engine.answers = [BOTH + "\nAnd I wait."]
    fields: Any = {**ASKED, "parallel_tool_calls": False}
    if stream:
        with client.chat.completions.stream(**fields) as events:
            (choice,) = events.get_final_completion().choices
    else:
        (choice,) = client.chat.completions.create(**fields).choices
    assert [made.function.name for made in calls(choice.message)] == ["weather"]
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    given: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    answer = client.responses.create(model=NAME, input="How?", tools=given, parallel_tool_calls=False)
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    assert not answer.parallel_tool_calls and answer.status == "completed"


def calls(message: Any) -> Any:
    assert message.tool_calls
    return message.tool_calls


def test_tools_prompt_for_templates_without_tools(live: LiveServer, alone: Engine) -> None:
    """Marks that are special tokens reach the output parser."""
    ids = alone.encode(ASKED["messages"], chat_template_kwargs={"tools": TOOLS})
    assert len(ids) > len(alone.encode(ASKED["messages"]))
    expected = alone.generate(ids, SamplingParams(max_tokens=6), speculate=False).text
    with live.client() as client:
        answer = client.chat.completions.create(**ASKED, max_tokens=6)
    assert answer.choices[0].message.content == expected
    bos = 1
    events = alone.stream(
        [5, 6], SamplingParams(allowed_token_ids=[bos], max_tokens=2), shown=frozenset({bos})
    )
    assert "".join(
        event.text for event in events if isinstance(event, TextDelta)
    ) == 2 * alone.decode_with_special([bos])

"""Tool calls in every family's format: parsed or refused as a whole, however the text is split or cut."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from offspec.chat.answer_parser import AnswerPart, TextPart, ToolCall
from offspec.chat.chat_format_parser import ChatFormatParser
from offspec.chat.chat_formats import chat_format_of, reasoning_marks

PROPERTIES: dict[str, Any] = {
    "path": {"type": "string"},
    "content": {"type": "string"},
    "count": {"type": "integer"},
    "deep": {"type": "object", "properties": {"a": {"type": "array"}}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["path"]},
        },
    }
    for name in ("write_file", "mcp.read-2")
]
MARKS = (
    *("</tool_call>", "<tool_call>", "<function=x>", "</function>", "<parameter=path>", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "<arg_key>", "</arg_value>", "</think>", "<|python_tag|>", '"}}', "\\", '"'),
    *("{", "}", "\n", "\t", "é", "日", "```", "null", " "),
)
Arguments = dict[str, Any]


def hermes(name: str, given: Arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': given}, ensure_ascii=False)}\n</tool_call>"


def tagged(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def coder(name: str, given: Arguments) -> str:
    inner = "".join(f"<parameter={key}>\n{tagged(value)}\n</parameter>\n" for key, value in given.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def glm(name: str, given: Arguments) -> str:
    pairs = (
        f"<arg_key>{key}</arg_key>\n<arg_value>{tagged(value)}</arg_value>\n" for key, value in given.items()
    )
    return f"<tool_call>{name}\n{''.join(pairs)}</tool_call>"


def harmony(name: str, given: Arguments) -> str:
    header = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return header + json.dumps(given) + "<|call|>"


def deepseek(name: str, given: Arguments) -> str:
    call = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(given)}<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def kimi(name: str, given: Arguments) -> str:
    head = f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
    return f"<|tool_calls_section_begin|>{head}{json.dumps(given)}<|tool_call_end|><|tool_calls_section_end|>"


# By the mark of a chat template.
FORMS: dict[str, Callable[[str, Arguments], str]] = {
    "<tool_call>": hermes,
    "<function=": coder,
    "<arg_key>": glm,
    "[TOOL_CALLS]": lambda name, given: f"[TOOL_CALLS]{name}[ARGS]{json.dumps(given)}",
    "<｜tool▁calls▁begin｜>": deepseek,
    "<|tool_calls_section_begin|>": kimi,
    "<|channel|>": harmony,
    "dictionary of argument name and its value": lambda name, given: json.dumps(
        {"name": name, "parameters": given}, ensure_ascii=False
    ),
}


def taken(template: str, text: str, pieces: int) -> list[AnswerPart]:
    """Parse a text that arrives in pieces of up to this many characters."""
    dice = random.Random(pieces)
    parts, reader, at = (
        list[AnswerPart](),
        ChatFormatParser(chat_format_of(template), reasoning_marks(template), tools=TOOLS),
        0,
    )
    while at < len(text):
        size = dice.randint(1, pieces)
        parts += reader.feed(text[at : at + size])
        at += size
    return [*parts, *reader.finish()]


def calls_of(parts: list[AnswerPart]) -> list[tuple[str, Arguments]]:
    return [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, ToolCall)]


def text_of(parts: list[AnswerPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def chosen(dice: random.Random) -> tuple[str, Arguments]:
    """A tool and arguments for it, with marks within texts."""

    def words() -> str:
        return "x".join(dice.choice(MARKS) for _ in range(dice.randrange(6))) + "."

    given: Arguments = {"path": words()}
    if dice.random() < 0.7:
        given["content"] = words()
    if dice.random() < 0.5:
        given["count"] = dice.randrange(-5, 10**6)
    if dice.random() < 0.3:
        given["deep"] = {"a": [words(), None, {"b": [dice.random()]}]}
    return dice.choice(TOOLS)["function"]["name"], given


@pytest.mark.parametrize("template", FORMS)
def test_calls_of_each_family(template: str) -> None:
    """300 calls: the same in pieces of any size; complete, and truncated."""
    dice = random.Random(template)
    write = FORMS[template]
    for _ in range(300):
        name, given = chosen(dice)
        text = write(name, given)
        assert calls_of(taken(template, text, len(text))) == [(name, given)], text
        assert calls_of(taken(template, text, 5)) == [(name, given)], text
        cut = text[: dice.randrange(len(text))]
        for pieces in (len(text), 3):
            found = taken(template, cut, pieces)
            assert calls_of(found) in ([], [(name, given)]), cut


@pytest.mark.parametrize("template", FORMS)
def test_stray_mark_before_a_call(template: str) -> None:
    call = FORMS[template]("write_file", {"path": "a"})
    mark = "<|channel|>" if template == "<|channel|>" else call[: call.index("write_file")].strip()[:11]
    if chat_format_of(template) and not chat_format_of(template).at_start:  # type: ignore[union-attr]
        parts = taken(template, f"Look: {mark} is a mark. {call}", 4)
        assert calls_of(parts) == [("write_file", {"path": "a"})]
        assert "is a mark." in text_of(parts)


UNCLOSED = {
    "the last parameter": "<parameter=path>\na\n</parameter>\n<parameter=content>\nb\n",
    "the first parameter": "<parameter=path>\na\n<parameter=content>\nb\n</parameter>\n",
    "a damaged mark": "<parameter=path>\na\n</parameter/>\n<parameter=content>\nb\n</parameter/>\n",
}


@pytest.mark.parametrize("case", UNCLOSED)
@pytest.mark.parametrize("bare", [False, True])
def test_parameter_ends_at_the_next_tag(case: str, bare: bool) -> None:
    text = f"<function=write_file>\n{UNCLOSED[case]}</function>"
    text = f"I look.\n\n{text}\n</tool_call>" if bare else f"I look.\n\n<tool_call>\n{text}\n</tool_call>"
    for pieces in (1, 9, len(text)):
        parts = taken("<function=", text, pieces)
        assert calls_of(parts) == [("write_file", {"path": "a", "content": "b"})]
        assert text_of(parts) == "I look."


@pytest.mark.parametrize(
    "given",
    [{}, {"content": "a"}, {"path": 3}, {"path": "a", "count": "many"}, {"path": "a", "deep": []}],
    ids=["nothing", "without path", "path", "count", "deep"],
)
@pytest.mark.parametrize("template", FORMS)
def test_arguments_that_violate_the_schema_are_text(template: str, given: Arguments) -> None:
    parts = taken(template, FORMS[template]("write_file", given), 6)
    if template in ("<function=", "<arg_key>") and given.get("path") == 3:
        given = {"path": "3"}  # a text without quotes
        assert calls_of(parts) == [("write_file", given)]
    else:
        assert not calls_of(parts) and text_of(parts)


def test_unsupported_schema_allows_everything() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]
    reader = ChatFormatParser(chat_format_of("<tool_call>"), None, tools=tools)
    assert calls_of([*reader.feed(hermes("f", {"a": 1})), *reader.finish()]) == [("f", {"a": 1})]


VALUES: list[tuple[Any, str, Any]] = [
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "123", "123"),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, '{"a": 1}', '{"a": 1}'),
    ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "123", 123),
    ({"enum": ["123", "x"]}, "123", "123"),
    ({"$ref": "#/$defs/text"}, "true", "true"),
    ({"type": ["integer", "string"]}, "5", "5"),
    ({"type": "boolean"}, "True", True),
    ({}, "5", 5),
    ({"description": "anything"}, "some text", "some text"),
]


@pytest.mark.parametrize("case", range(len(VALUES)))
def test_unquoted_values_are_parsed_by_their_schema(case: int) -> None:
    schema, text, expected = VALUES[case]
    parameters = {"properties": {"a": schema}, "$defs": {"text": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    reader = ChatFormatParser(chat_format_of("<function="), None, tools=tools)
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"
    assert calls_of([*reader.feed(call), *reader.finish()]) == [("f", {"a": expected})]


def test_schemas_fetch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's pattern cannot take long either."""
    import urllib.request

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("an address was opened")

    monkeypatch.setattr(urllib.request, "urlopen", forbidden)
    properties = {"a": {"$ref": "http://127.0.0.1:9/x"}, "b": {"type": "string", "pattern": "^(a+)+$"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    reader = ChatFormatParser(chat_format_of("<tool_call>"), None, tools=tools)
    given = {"b": "a" * 60 + "!", "a": 1}
    assert calls_of([*reader.feed(hermes("f", given)), *reader.finish()]) == [("f", given)]


LONG = {
    "<function=": ("<function=write_file>\n<parameter=path>\n", "<parameter=", "<function=", "</parameter>"),
    "<tool_call>": ("<tool_call>{", "{", "<tool_call>"),
    "<|channel|>": ("<|channel|>", "<|start|>assistant", " to=functions."),
}


@pytest.mark.parametrize("template", LONG)
def test_incomplete_marks_are_parsed_in_linear_time(template: str) -> None:
    for piece in LONG[template]:
        text = piece * (30_000 // len(piece))
        parts = taken(template, text, 40)
        assert not calls_of(parts)
        assert template == "<|channel|>" or text_of(parts) == text

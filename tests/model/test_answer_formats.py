"""Parsing of answers in every known format, however the text is split; malformed calls are text."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offspec.chat.answer_parser import (
    AnswerPart,
    PlainTextParser,
    ReasoningPart,
    SingleCallParser,
    TextPart,
    ToolCall,
)
from offspec.model import answer_formats

WEATHER = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": WEATHER}}}
    for name in ("weather", "time")
]
OSLO = '{"city": "Oslo", "days": 2}'
CALL = ("weather", OSLO)
HERMES = '<tool_call>\n{"name": "weather", "arguments": ' + OSLO + "}\n</tool_call>"
LLAMA = '{"name": "weather", "parameters": ' + OSLO + "}"
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
OWN = {
    "start_anchor": "<|bot|>",
    "fields": {
        "reasoning_content": {"open": "<mull>", "close": "</mull>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"<use (?P<name>\w+)>",
            "close": "</use>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def codec(template: str, special: tuple[str, ...] = (), own: Any = None) -> Any:
    return SimpleNamespace(
        tokenizer=SimpleNamespace(chat_template=template, response_template=own),
        special_ids=frozenset(range(len(special))),
        eos_ids=frozenset({0}) if special else frozenset(),
        decode_with_special=lambda ids: "".join(special[i] for i in ids),
        folder=Path("model"),
        answer_marks=template,
    )


def joined(parts: list[AnswerPart]) -> list[tuple[str, ...]]:
    """Merge adjacent parts of one kind."""
    found = list[tuple[str, ...]]()
    for part in parts:
        kind = type(part).__name__
        if isinstance(part, ToolCall):
            found.append((part.name, part.arguments))
        elif found and found[-1][0] == kind:
            found[-1] = (kind, found[-1][1] + part.text)
        else:
            found.append((kind, part.text))
    return found


def parts_of(template: str, text: str, prompt: str = "", own: Any = None, tools: Any = TOOLS) -> Any:
    """Parse a text in one piece, by character, and in random pieces; return the common result."""
    make = answer_formats.find_parts_factory(codec(template, own=own), calls=bool(tools))
    assert make is not None
    found = []
    for most in (len(text), 1, 7):
        reader, parts, at = make(prompt, tools), list[AnswerPart](), 0
        while at < len(text):
            size = random.Random(at).randint(1, max(most, 1)) if most == 7 else max(most, 1)
            parts += reader.feed(text[at : at + size])
            at += size
        found.append(joined([*parts, *reader.finish()]))
    assert found[0] == found[1] == found[2]
    return found[0]


SAID = ("TextPart", "Sunny.")
THOUGHT = ("ReasoningPart", "Hm.")
DEEPSEEK = "<｜tool▁calls▁begin｜>"
HARMONY = "<|channel|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Sunny."
CASES: dict[str, tuple[str, str, list[tuple[str, ...]]]] = {
    "hermes": ("<tool_call>", HERMES, [CALL]),
    "hermes, text before": ("<tool_call>", "Sunny.\n\n" + HERMES, [SAID, CALL]),
    "hermes, two": ("<tool_call>", HERMES + "\n" + HERMES, [CALL, CALL]),
    "hermes, not closed": ("<tool_call>", HERMES.removesuffix("</tool_call>"), [CALL]),
    "hermes, text behind": ("<tool_call>", HERMES + "\n\nSunny.", [CALL, SAID]),
    "thought": ("</think>", "<think>\nHm.\n</think>\n\nSunny.", [THOUGHT, SAID]),
    "thought and call": ("</think><tool_call>", "<think>Hm.</think>\n" + HERMES, [THOUGHT, CALL]),
    "thought of a call": (
        "</think><tool_call>",
        f"<think>{HERMES}</think>Sunny.",
        [("ReasoningPart", HERMES), SAID],
    ),
    "thought, not closed": ("</think>", "<think>Hm. ", [THOUGHT]),
    "a tag in text": ("</think>", "Write <think> first. ", [("TextPart", "Write <think> first. ")]),
    "mistral, list": (
        "[TOOL_CALLS]",
        '[TOOL_CALLS] [{"name": "weather", "arguments": ' + OSLO + '}, {"name": "time", "arguments": {}}]',
        [CALL, ("time", "{}")],
    ),
    "mistral": ("[TOOL_CALLS]", f"Sunny.[TOOL_CALLS]weather[ARGS]{OSLO}", [SAID, CALL]),
    "mistral, two": (
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]weather[CALL_ID]abc123xyz[ARGS]{OSLO}[TOOL_CALLS]time[ARGS]{{}}",
        [CALL, ("time", "{}")],
    ),
    "magistral": ("[TOOL_CALLS][/THINK]", "[THINK]Hm.[/THINK]Sunny.", [THOUGHT, SAID]),
    "coder": ("<tool_call><function=", CODER, [CALL]),
    "coder, bare": ("<tool_call><function=", "<function=time>\n</function>", [("time", "{}")]),
    "deepseek v3": (
        DEEPSEEK,
        "Sunny.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{OSLO}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [SAID, CALL, ("time", "{}")],
    ),
    "deepseek v3.1": (
        DEEPSEEK + "</think>",
        "<think>Hm.</think>Sunny.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        f"{OSLO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [THOUGHT, SAID, CALL],
    ),
    "kimi": (
        "<|tool_calls_section_begin|>",
        "Sunny.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{OSLO}<|tool_call_end|><|tool_calls_section_end|>",
        [SAID, CALL],
    ),
    "glm": (
        "<tool_call> <arg_key>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\nSunny.",
        [CALL, SAID],
    ),
    "glm, bare": ("<tool_call> <arg_key>", "<tool_call>time\n</tool_call>", [("time", "{}")]),
    "llama": ("dictionary of argument name and its value", LLAMA, [CALL]),
    "llama, tag": ("dictionary of argument name and its value", "<|python_tag|>" + LLAMA, [CALL]),
    "llama, text": ("dictionary of argument name and its value", "Sunny.", [SAID]),
    "harmony": (HARMONY, "<|channel|>analysis<|message|>Hm.<|end|>" + FINAL, [THOUGHT, SAID]),
    "harmony, call": (
        HARMONY,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{OSLO}",
        [THOUGHT, CALL],
    ),
    "harmony, call to the role": (
        HARMONY,
        f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{OSLO}",
        [CALL],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_families(case: str) -> None:
    template, text, expected = CASES[case]
    assert parts_of(template, text) == expected


@pytest.mark.parametrize(
    "body",
    [
        "{garbled",
        '{"name": "weather"}',
        '{"name": "weather", "arguments": [1]}',
        '{"name": "unknown", "arguments": {}}',
        '{"name": 3, "arguments": {}}',
        "[" * 5000,
        "",
    ],
)
def test_malformed_calls_are_text(body: str) -> None:
    call = f"<tool_call>{body}</tool_call>"
    assert parts_of("<tool_call>", f"Sunny. {call} So. {HERMES}") == [
        ("TextPart", f"Sunny. {call} So."),
        CALL,
    ]
    cut = f"Sunny. <tool_call>{body}"
    assert parts_of("<tool_call>", cut) == [("TextPart", cut)]


def test_malformed_calls_of_other_families() -> None:
    for template, text in (
        ("[TOOL_CALLS]", "[TOOL_CALLS]weather[ARGS]{"),
        ("[TOOL_CALLS]", '[TOOL_CALLS] [{"name": "weather", "arguments": {}}, 3]'),
        ("dictionary of argument name and its value", '{"name": "Alice", "age": 3}'),
    ):
        assert parts_of(template, text) == [("TextPart", text)]


def test_a_damaged_header_of_harmony_is_not_shown() -> None:
    for header in (
        "<|channel|>commentary to=functions.weather<|message|>",
        "<|start|>assistant<|channel|>commentary to=weather<|message|>",
        "<|channel|>final final<|message|>",
        "<|start|><|message|>",
    ):
        assert parts_of(HARMONY, f"{header}Oslo<|end|>") == [("TextPart", "Oslo")]


def test_a_prompt_may_open_the_reasoning() -> None:
    for prompt, expected in (("<bot><think>\n", [THOUGHT, SAID]), ("<bot><think>\n\n</think>\n\n", None)):
        text = "Hm.\n</think>\n\nSunny."
        assert parts_of("</think>", text, prompt) == (expected or [("TextPart", text)])


def test_the_tokenizers_own_template() -> None:
    prompt = "<|user|>Hm?<|bot|><mull>"
    text = f"Hm.</mull>Sunny.<use weather>{OSLO}</use>"
    assert parts_of("<tool_call>", text, prompt, OWN) == [THOUGHT, SAID, CALL]
    assert parts_of("", text.removesuffix("}</use>") + "</use> So.", prompt, OWN) == [
        THOUGHT,
        ("TextPart", "Sunny.<use weather>" + OSLO.removesuffix("}") + "</use> So."),
    ]


def test_without_tools_nothing_is_a_call() -> None:
    for template in ("<tool_call>", DEEPSEEK, "[TOOL_CALLS]"):
        assert answer_formats.find_parts_factory(codec(template), calls=False) is None
    assert parts_of(HARMONY, CASES["harmony"][1], tools=()) == [THOUGHT, SAID]
    text = "<think>Hm.</think>" + HERMES
    assert parts_of("</think><tool_call>", text, tools=()) == [THOUGHT, ("TextPart", HERMES)]


def test_an_unknown_format() -> None:
    assert answer_formats.find_parts_factory(codec("{{ messages }}"), calls=True) is None
    reader = PlainTextParser()
    assert [*reader.feed(" <tool_call> "), *reader.feed(""), *reader.finish()] == [TextPart(" <tool_call> ")]


def test_an_invalid_response_template() -> None:
    """Calls are then parsed by the chat template."""
    every: list[Any] = [{"fields": {}}, {"fields": {"content": {"open": 3}}}, ["content"]]
    for wrong in every:
        error = answer_formats.template_error(codec("<tool_call>", own=wrong))
        assert error is not None and "cannot be used: " in error
        assert answer_formats.find_parts_factory(codec("", own=wrong), calls=True) is None
        assert parts_of("<tool_call>", HERMES, own=wrong) == [CALL]
    assert (
        answer_formats.template_error(codec("", own=OWN)) is None is answer_formats.template_error(codec(""))
    )


def test_marks_that_are_special_tokens() -> None:
    special = ("<|end|>", "[TOOL_CALLS]", "<|python_tag|>", "[ARGS]", "<s>")  # the first ends answers
    make = answer_formats.find_parts_factory(codec("[TOOL_CALLS]", special), calls=True)
    assert make is not None and make("", TOOLS).shown == {1, 3}


def test_one_call() -> None:
    for text in (OSLO, '{"name": "weather", "argum', '{"name": "weather", "arguments": 3}'):
        reader = SingleCallParser()
        assert [*reader.feed(text[:9]), *reader.feed(text[9:]), *reader.finish()] == [TextPart(text)]
    whole = SingleCallParser()
    whole.feed(json.dumps({"name": "weather", "arguments": json.loads(OSLO)}))
    assert whole.finish() == [ToolCall(*CALL)]
    assert SingleCallParser().finish() == []
    assert isinstance(ReasoningPart(""), ReasoningPart)


def test_kinds_of_parts() -> None:
    assert {"call", "thought"} <= answer_formats.kinds(codec("<tool_call> </think>"))
    assert {"call", "thought"} <= answer_formats.kinds(codec("<|channel|>"))
    assert {"call", "thought"} <= answer_formats.kinds(codec("", own=OWN))
    assert not {"call", "thought"} & answer_formats.kinds(codec("{{ messages }}"))

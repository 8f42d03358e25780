"""Grammars of tool calls in the format of each model family: in Lark, from the opening mark on.

A call that follows such a grammar has the name of a tool and arguments that are valid by its schema. Families
are recognized by marks in their chat templates, as in `chat.chat_formats`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offspec.chat.chat_formats import reasoning_marks
from offspec.core.constraint import Constraint, Region, Regions
from offspec.core.errors import RequestError
from offspec.core.json_schema import forbid_extra_properties
from offspec.sampling.grammar import LAYOUT, check_format, with_preamble

Function = Mapping[str, Any]  # {"name", "parameters"} of a tool


class GrammarText:
    """Writer of Lark rules for one tokenizer.

    Args:
        special: Ids of special tokens by name. A grammar does not treat these as text.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = sorted(special.items(), key=lambda item: -len(item[0]))
        self.rules = list[str]()

    def literals(self, text: str) -> str:
        """Return text in Lark, with special tokens as ids, and a number pattern for each NUL."""
        parts = [f"<[{token}]>" for name, token in self._special if name == text]
        if not text or parts:
            return "".join(parts)
        for name in (*(name for name, _ in self._special), "\0"):
            before, found, after = text.partition(name)
            if found:
                inner = "/[0-9]{1,3}/" if name == "\0" else self.literals(name)
                return " ".join(filter(None, (self.literals(before), inner, self.literals(after))))
        return json.dumps(text, ensure_ascii=False)

    def rule(self, name: str, body: str) -> str:
        """Add a rule and return its name."""
        self.rules.append(f"{name}: {body}")
        return name

    def schema(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON with a schema, or for any value if the schema is not supported."""
        return self.rule(name, f"%json {json.dumps(_laid_out(schema), ensure_ascii=False)}")


def _laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema that grammars support; unsupported parts allow any value."""
    for one in (schema, _simpler(schema), {"type": schema.get("type", "object")}, {}):
        closed = forbid_extra_properties(one)
        if _can_be_followed(closed):
            return {"x-guidance": LAYOUT, **{name: closed[name] for name in closed if name != "x-guidance"}}
    return {"x-guidance": LAYOUT}


def _simpler(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an object schema in which properties with unsupported schemas allow any value."""
    properties = schema.get("properties")
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    kept = {
        name: kind if isinstance(kind, dict) and _can_be_followed({**shared, **kind}) else {}
        for name, kind in (properties.items() if isinstance(properties, dict) else ())
    }
    required = schema.get("required")
    return {
        **shared,
        "type": "object",
        "properties": kept,
        "required": required if isinstance(required, list) else [],
    }


def _can_be_followed(schema: Mapping[str, Any]) -> bool:
    try:
        check_format(Constraint("json_schema", json.dumps(schema)))
    except RequestError:
        return False
    return True


def _parameters(function: Function) -> dict[str, Any]:
    given = function.get("parameters")
    return {**(given if isinstance(given, dict) else {}), "type": "object"}


# (grammar, number of the function, function) -> body of the rule for its call
Calls = Callable[[GrammarText, int, Function], str]


def _json_calls(before: str, between: str, after: str) -> Calls:
    """Return the format of a call with JSON arguments: `before` NAME `between` ARGUMENTS `after`."""

    def call(text: GrammarText, at: int, function: Function) -> str:
        arguments = text.schema(f"arguments{at}", _parameters(function))
        head = text.literals(f"{before}{function['name']}{between}")
        return f"{head} {arguments} {text.literals(after)}"

    return call


def _tag_calls(before: str, named: str, key: str, value: str, close: str, after: str) -> Calls:
    """Return the format of a call with a tag for each argument, in the order of the schema.

    A string value is written as plain text up to the first `close`; other values are JSON.

    Args:
        before: Text before the name of the function.
        named: Text after the name of the function.
        key: Text before the name of an argument.
        value: Text between the name of an argument and its value.
        close: Text after a value.
        after: Text after the last argument.
    """

    def call(text: GrammarText, at: int, function: Function) -> str:
        schema, tags = _parameters(function), list[str]()
        required = schema.get("required") or ()
        if not _is_flat(schema):
            held = _tag_value(text, f"value{at}", {}, close, schema)
            name = text.rule(f"NAME{at}", "/[^<>\\n]{1,128}/")
            tag = text.rule(f"tag{at}", f"{text.literals(key)} {name} {text.literals(value)} {held}")
            tags.append(f"{tag}*")
        for index, (name, kind) in enumerate(schema.get("properties", {}).items() if not tags else ()):
            held = _tag_value(text, f"value{at}_{index}", kind, close, schema)
            tag = text.rule(f"tag{at}_{index}", f"{text.literals(key + name + value)} {held}")
            tags.append(tag if name in required else f"{tag}?")
        return " ".join((text.literals(f"{before}{function['name']}{named}"), *tags, text.literals(after)))

    return call


def _is_flat(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema lists all its properties, with names that tags can have."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    composed = any(name in schema for name in ("$ref", "allOf", "anyOf", "oneOf", "patternProperties"))
    more = bool(schema.get("additionalProperties")) and not properties
    plain = all(name and not set(name) & {*"<>"} and name.isprintable() for name in properties)
    return plain and not composed and not more and all(name in properties for name in required)


def _may_be_text(kind: Any) -> bool:
    """Return whether a schema may allow strings, judged without resolving references."""
    if not isinstance(kind, dict) or "$ref" in kind:
        return True
    for name in ("anyOf", "oneOf"):
        if isinstance(kind.get(name), list):
            return any(map(_may_be_text, kind[name]))
    types = kind.get("type")
    if types is None:
        values = kind.get("enum", [kind.get("const", "")])
        return not isinstance(values, list) or any(isinstance(value, str) for value in values)
    return "string" in (types if isinstance(types, list) else [types])


def _tag_value(text: GrammarText, name: str, kind: Any, close: str, schema: Mapping[str, Any]) -> str:
    """Add the rule of a value; return it followed by the closing text."""
    kind = kind if isinstance(kind, dict) else {}
    choices = kind.get("enum", [kind["const"]] if "const" in kind else None)
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"{text.rule(name, ' | '.join(map(text.literals, choices)))} {text.literals(close)}"
    if not _may_be_text(kind):
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return f"{text.schema(name, {**kind, **definitions})} {text.literals(close)}"
    ending = text.literals(close)
    if "<[" in ending:  # a special token is not part of a text
        return f"/(.|\\n)*/ {ending}"
    least, most = kind.get("minLength", 0), kind.get("maxLength")
    if not isinstance(least, int) or least < 0 or not isinstance(most, int | None):
        least, most = 0, None
    if least or most is not None:
        return text.rule(name.upper(), f"/(.|\\n){{{least},{'' if most is None else most}}}/ {ending}")
    text.rule(f"{name}[lazy]", f"/(.|\\n)*/ {ending}")
    return name


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """Tool call format of a model family.

    Args:
        mark: Text that opens a region of calls.
        calls: Returns the grammar for a call of one function.
        before: Text at the beginning of a region, after the mark.
        between: Text between two calls; None: a region has a single call.
        after: Text after the last call.
        at_start: Whether calls occur only at the beginning of an answer.
        others: Texts that may come instead of `before` and a call.
    """

    mark: str
    calls: Calls
    before: str = ""
    between: str | None = None
    after: str = ""
    at_start: bool = False
    others: tuple[str, ...] = ()

    def grammar(self, functions: Sequence[Function], special: Mapping[str, int], mark: str = "") -> str:
        """Return the grammar of a region after its mark, in Lark. `mark`: text to match before it."""
        text = GrammarText(special)
        calls = [text.rule(f"call{at}", self.calls(text, at, of)) for at, of in enumerate(functions)]
        call = text.rule("call", " | ".join(calls))
        more = "" if self.between is None else f"({text.literals(self.between)} {call})*"
        begins = " | ".join((f"{text.literals(self.before)} {call} {more}", *map(text.literals, self.others)))
        start = f"{text.literals(mark)} ({begins}) {text.literals(self.after)}"
        return "\n".join((f"start: {start}", *text.rules))


_OBJECT = _json_calls('{"name": "', '", "arguments": ', "}")
_XML = ("<parameter=", ">\n", "\n</parameter>\n")
_LLAMA = ('", "parameters": ', "}")


def _mistral(template: str) -> tuple[ToolCallFormat, ...]:
    if "[ARGS]" in template:
        return (ToolCallFormat("[TOOL_CALLS]", _json_calls("", "[ARGS]", "")),)
    return (ToolCallFormat("[TOOL_CALLS]", _OBJECT, before=" [", between=", ", after="]"),)


def _deepseek(template: str) -> tuple[ToolCallFormat, ...]:
    begins, separator, ends = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    if "```json" in template:  # V3, R1
        calls = _json_calls(f"{begins}function{separator}", "\n```json\n", f"\n```{ends}")
        return (ToolCallFormat("<｜tool▁calls▁begin｜>", calls, between="\n", after="<｜tool▁calls▁end｜>"),)
    calls = _json_calls(begins, separator, ends)
    return (ToolCallFormat("<｜tool▁calls▁begin｜>", calls, between="", after="<｜tool▁calls▁end｜>"),)


# By a mark in the chat template, as in `chat.chat_formats`.
FORMS: dict[str, Callable[[str], tuple[ToolCallFormat, ...]]] = {
    "<|channel|>": lambda _: (
        ToolCallFormat(
            "<|channel|>",
            _json_calls("", " <|constrain|>json<|message|>", ""),
            before="commentary to=functions.",
            others=("analysis<|message|>", "commentary<|message|>", "final<|message|>"),
        ),
        ToolCallFormat(
            "<|start|>assistant to=functions.",
            _json_calls("", "<|channel|>commentary <|constrain|>json<|message|>", ""),
        ),
    ),
    "[TOOL_CALLS]": _mistral,
    "<｜tool▁calls▁begin｜>": _deepseek,
    "<|tool_calls_section_begin|>": lambda _: (
        ToolCallFormat(
            "<|tool_calls_section_begin|>",
            _json_calls(
                "<|tool_call_begin|>functions.", ":\0<|tool_call_argument_begin|>", "<|tool_call_end|>"
            ),
            between="",
            after="<|tool_calls_section_end|>",
        ),
    ),
    "<arg_key>": lambda _: (
        ToolCallFormat(
            "<tool_call>",
            _tag_calls("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        ),
    ),
    "<function=": lambda _: (
        ToolCallFormat("<tool_call>", _tag_calls("\n<function=", ">\n", *_XML, "</function>\n</tool_call>")),
        ToolCallFormat("<function=", _tag_calls("", ">\n", *_XML, "</function>")),
    ),
    "<tool_call>": lambda _: (ToolCallFormat("<tool_call>", _OBJECT, before="\n", after="\n</tool_call>"),),
    "dictionary of argument name and its value": lambda _: (
        ToolCallFormat("<|python_tag|>", _json_calls('{"name": "', *_LLAMA)),
        ToolCallFormat('{"name":', _json_calls(' "', *_LLAMA), at_start=True),
    ),
}


def tool_call_formats(template: str) -> tuple[ToolCallFormat, ...]:
    """Return the tool call formats of a model with this chat template; () if unknown."""
    return next((forms(template) for mark, forms in FORMS.items() if mark in template), ())


def answer_regions(
    template: str, functions: Sequence[Function], special: Mapping[str, int], thinking: bool
) -> Regions | None:
    """Return the format of an answer that may call functions; None if the model's call format is unknown.

    Args:
        template: Chat template of the model.
        functions: Functions that may be called.
        special: Ids of special tokens by name.
        thinking: Whether the prompt opens the answer's reasoning.
    """
    forms = tool_call_formats(template)
    if not forms or not functions:
        return None
    regions = tuple(Region(form.mark, form.grammar(functions, special), form.at_start) for form in forms)
    return Regions(regions, thought=reasoning_marks(template), thinking=thinking)


def required_call_regions(
    template: str,
    functions: Sequence[Function],
    special: Mapping[str, int],
    thinking: bool,
    tokens: int | None = None,
) -> Regions | None:
    """Return the format of an answer that must be a call, after reasoning; None if the format is unknown.

    Args:
        template: Chat template of the model.
        functions: Functions that may be called.
        special: Ids of special tokens by name.
        thinking: Whether the prompt opens the answer's reasoning.
        tokens: Maximum tokens of the reasoning. Default: unlimited.
    """
    forms = [form for form in tool_call_formats(template) if not form.others]
    if not forms or not functions:
        return None
    thought = reasoning_marks(template)
    return Regions(
        thought=thought,
        thinking=thinking and thought is not None,
        required=forms[0].grammar(functions, special, forms[0].mark),
        thought_tokens=tokens,
        cut=forms[0].grammar(functions, special, f"{thought[1]}\n\n{forms[0].mark}") if thought else "",
    )


def after_reasoning(
    template: str, format: Constraint, special: Mapping[str, int], tokens: int | None = None
) -> Constraint:
    """Return a constraint that applies `format` after the reasoning that the prompt opens.

    Args:
        template: Chat template of the model.
        format: Format of the answer.
        special: Ids of special tokens by name.
        tokens: Maximum tokens of the reasoning. Default: unlimited.
    """
    thought = reasoning_marks(template)
    if thought is None or format.kind == "regions":
        return format
    gap = '"\\n\\n"?'
    return Regions(
        thought=thought,
        thinking=True,
        required=with_preamble(format, gap),
        thought_tokens=tokens,
        cut=""
        if tokens is None
        else with_preamble(format, f"{GrammarText(special).literals(thought[1])} {gap}"),
    ).constraint()

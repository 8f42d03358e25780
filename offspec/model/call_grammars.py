"""Grammars of calls of tools, as each family of models writes them: in Lark, from the opening mark on.

A call that follows one has the name of a tool and arguments that are valid by its schema. Families are known
by what their chat templates write, as in `chat.families`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offspec.chat.families import thought_marks
from offspec.core.constraint import Constraint, Region, Regions
from offspec.core.errors import RequestError
from offspec.core.json_schema import closed_schema
from offspec.sampling.grammar import LAYOUT, check_format, preceded

Function = Mapping[str, Any]  # {"name", "parameters"} of a tool
_ANY: dict[str, Any] = {"type": "object"}


class GrammarText:
    """Writes rules in Lark for one tokenizer.

    special: ids of special tokens, which are not text to a grammar, by their names.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = sorted(special.items(), key=lambda item: -len(item[0]))
        self.rules = list[str]()

    def literals(self, text: str) -> str:
        """Text in Lark: special tokens in it by their ids, and a number for each NUL."""
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
        """Add a rule, and return its name."""
        self.rules.append(f"{name}: {body}")
        return name

    def schema(self, name: str, schema: Mapping[str, Any]) -> str:
        """Add a rule for JSON with a schema; for any value if the schema cannot be followed."""
        return self.rule(name, f"%json {json.dumps(_laid_out(schema), ensure_ascii=False)}")

    def grammar(self, start: str) -> str:
        """The grammar with this beginning."""
        return "\n".join((f"start: {start}", *self.rules))


def _laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    try:
        check_format(Constraint("json_schema", json.dumps(schema)))
    except RequestError:
        schema = {"type": schema["type"]} if isinstance(schema.get("type"), str) else {}
    return {"x-guidance": LAYOUT, **closed_schema(schema)}


def _parameters(function: Function) -> dict[str, Any]:
    return {**_ANY, **(function.get("parameters") or {})}


Calls = Callable[[GrammarText, Sequence[Function]], str]  # adds the rule of one call, and returns its name


def _json_calls(before: str, between: str, after: str) -> Calls:
    """A call with arguments in JSON: `before` NAME `between` ARGUMENTS `after`."""

    def write(text: GrammarText, functions: Sequence[Function]) -> str:
        calls = []
        for at, function in enumerate(functions):
            arguments = text.schema(f"arguments{at}", _parameters(function))
            head = text.literals(f"{before}{function['name']}{between}")
            calls.append(text.rule(f"call{at}", f"{head} {arguments} {text.literals(after)}"))
        return text.rule("call", " | ".join(calls))

    return write


def _tag_calls(before: str, named: str, key: str, value: str, close: str, after: str) -> Calls:
    """A call with a tag for each argument, in the order of its schema.

    A text stands as it is, up to the first `close`; other values are JSON.

    Args:
        before: Before the name of the function.
        named: After it.
        key: Before the name of an argument.
        value: Between that and its value.
        close: After the value.
        after: After the last argument.
    """

    def write(text: GrammarText, functions: Sequence[Function]) -> str:
        calls = []
        for at, function in enumerate(functions):
            schema = _parameters(function)
            required = schema.get("required") or ()
            tags = list[str]()
            for index, (name, kind) in enumerate((schema.get("properties") or {}).items()):
                held = _tag_value(text, f"value{at}_{index}", kind, close, schema)
                tag = text.rule(f"tag{at}_{index}", f"{text.literals(key + name + value)} {held}")
                tags.append(tag if name in required else f"{tag}?")
            parts = (text.literals(f"{before}{function['name']}{named}"), *tags, text.literals(after))
            calls.append(text.rule(f"call{at}", " ".join(parts)))
        return text.rule("call", " | ".join(calls))

    return write


def _tag_value(text: GrammarText, name: str, kind: Any, close: str, schema: Mapping[str, Any]) -> str:
    """Add the rule of a value, and return it with what closes it."""
    kind = kind if isinstance(kind, dict) else {}
    choices = kind.get("enum", [kind["const"]] if "const" in kind else None)
    if choices and all(isinstance(choice, str) for choice in choices):
        return f"{text.rule(name, ' | '.join(map(text.literals, choices)))} {text.literals(close)}"
    if kind.get("type") in ("integer", "number", "boolean", "object", "array", "null"):
        definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return f"{text.schema(name, {**kind, **definitions})} {text.literals(close)}"
    ending = text.literals(close)
    if "<[" in ending:  # a special token is not part of a text
        return f"/(.|\\n)*/ {ending}"
    least, most = kind.get("minLength", 0), kind.get("maxLength")
    if least or most is not None:
        return text.rule(name.upper(), f"/(.|\\n){{{least},{'' if most is None else most}}}/ {ending}")
    text.rule(f"{name}[lazy]", f"/(.|\\n)*/ {ending}")
    return name


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family writes calls.

    Args:
        mark: Opens a region.
        calls: Writes one call.
        before: What the region begins with, after the mark.
        between: Between two calls; None: a region has one.
        after: After the last.
        at_start: Calls are only at the beginning of an answer.
        others: Alternatives to a call, each a text; the call then begins with `before`.
    """

    mark: str
    calls: Calls
    before: str = ""
    between: str | None = None
    after: str = ""
    at_start: bool = False
    others: tuple[str, ...] = ()

    def grammar(self, functions: Sequence[Function], special: Mapping[str, int], mark: str = "") -> str:
        """What follows the mark, in Lark. mark: comes before it."""
        text = GrammarText(special)
        call = self.calls(text, functions)
        more = "" if self.between is None else f"({text.literals(self.between)} {call})*"
        begins = " | ".join((f"{text.literals(self.before)} {call} {more}", *map(text.literals, self.others)))
        return text.grammar(f"{text.literals(mark)} ({begins}) {text.literals(self.after)}")

    def region(self, functions: Sequence[Function], special: Mapping[str, int]) -> Region:
        """The region of a family's calls."""
        return Region(self.mark, self.grammar(functions, special), self.at_start)


_OBJECT = _json_calls('{"name": "', '", "arguments": ', "}")
_XML = ("<parameter=", ">\n", "\n</parameter>\n")
_LLAMA = ('", "parameters": ', "}")


def _mistral(template: str) -> tuple[CallForm, ...]:
    if "[ARGS]" in template:
        return (CallForm("[TOOL_CALLS]", _json_calls("", "[ARGS]", "")),)
    return (CallForm("[TOOL_CALLS]", _OBJECT, before=" [", between=", ", after="]"),)


def _deepseek(template: str) -> tuple[CallForm, ...]:
    begins, separator, ends = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    if "```json" in template:  # V3, R1
        calls = _json_calls(f"{begins}function{separator}", "\n```json\n", f"\n```{ends}")
        return (CallForm("<｜tool▁calls▁begin｜>", calls, between="\n", after="<｜tool▁calls▁end｜>"),)
    calls = _json_calls(begins, separator, ends)
    return (CallForm("<｜tool▁calls▁begin｜>", calls, between="", after="<｜tool▁calls▁end｜>"),)


# By what a chat template has in it, as in `chat.families`.
FORMS: dict[str, Callable[[str], tuple[CallForm, ...]]] = {
    "<|channel|>": lambda _: (
        CallForm(
            "<|channel|>",
            _json_calls("", " <|constrain|>json<|message|>", ""),
            before="commentary to=functions.",
            others=("analysis<|message|>", "commentary<|message|>", "final<|message|>"),
        ),
        CallForm(
            "<|start|>assistant to=functions.",
            _json_calls("", "<|channel|>commentary <|constrain|>json<|message|>", ""),
        ),
    ),
    "[TOOL_CALLS]": _mistral,
    "<｜tool▁calls▁begin｜>": _deepseek,
    "<|tool_calls_section_begin|>": lambda _: (
        CallForm(
            "<|tool_calls_section_begin|>",
            _json_calls(
                "<|tool_call_begin|>functions.", ":\0<|tool_call_argument_begin|>", "<|tool_call_end|>"
            ),
            between="",
            after="<|tool_calls_section_end|>",
        ),
    ),
    "<arg_key>": lambda _: (
        CallForm(
            "<tool_call>",
            _tag_calls("", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>"),
        ),
    ),
    "<function=": lambda _: (
        CallForm("<tool_call>", _tag_calls("\n<function=", ">\n", *_XML, "</function>\n</tool_call>")),
        CallForm("<function=", _tag_calls("", ">\n", *_XML, "</function>")),
    ),
    "<tool_call>": lambda _: (CallForm("<tool_call>", _OBJECT, before="\n", after="\n</tool_call>"),),
    "dictionary of argument name and its value": lambda _: (
        CallForm("<|python_tag|>", _json_calls('{"name": "', *_LLAMA)),
        CallForm('{"name":', _json_calls(' "', *_LLAMA), at_start=True),
    ),
}


def call_forms(template: str) -> tuple[CallForm, ...]:
    """How a model with this chat template writes calls; () if that is unknown."""
    return next((forms(template) for mark, forms in FORMS.items() if mark in template), ())


def answer_regions(
    template: str, functions: Sequence[Function], special: Mapping[str, int], thinking: bool
) -> Regions | None:
    """The format of an answer that may call functions; None for a family whose calls are unknown.

    Args:
        template: The chat template.
        functions: Those that may be called.
        special: Special tokens, by their names.
        thinking: The prompt begins the answer's reasoning.
    """
    forms = call_forms(template)
    if not forms or not functions:
        return None
    regions = tuple(form.region(functions, special) for form in forms)
    return Regions(regions, thought=thought_marks(template), thinking=thinking)


def only_calls(
    template: str,
    functions: Sequence[Function],
    special: Mapping[str, int],
    thinking: bool,
    tokens: int | None = None,
) -> Regions | None:
    """The format of an answer that is a call after its reasoning; None for an unknown family.

    tokens: Most tokens of the reasoning; the others: see `answer_regions`.
    """
    forms = [form for form in call_forms(template) if not form.others]
    if not forms or not functions:
        return None
    thought = thought_marks(template)
    return Regions(
        thought=thought,
        thinking=thinking and thought is not None,
        required=forms[0].grammar(functions, special, forms[0].mark),
        last=True,
        thought_tokens=tokens,
        cut=forms[0].grammar(functions, special, f"{thought[1]}\n\n{forms[0].mark}") if thought else "",
    )


def after_thought(
    template: str, format: Constraint, special: Mapping[str, int], tokens: int | None = None
) -> Constraint:
    """A format that an answer has after the reasoning that its prompt begins.

    Args:
        template: The chat template.
        format: Of the answer.
        special: Special tokens, by their names.
        tokens: Most tokens of the reasoning. None: any number.
    """
    thought = thought_marks(template)
    if thought is None or format.kind == "regions":
        return format
    gap = '"\\n\\n"?'
    return Regions(
        thought=thought,
        thinking=True,
        required=preceded(format, gap),
        last=True,
        thought_tokens=tokens,
        cut="" if tokens is None else preceded(format, f"{GrammarText(special).literals(thought[1])} {gap}"),
    ).constraint()

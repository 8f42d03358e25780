"""Tools of a request: functions, and custom tools, whose argument is text. Other kinds are left out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offspec.server.api_errors import invalid
from offspec.server.parsing import convert

_INPUT = "input"  # the parameter of the function that stands for a custom tool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that an answer may call.

    Args:
        functions: As chat templates take them: {"type": "function", "function": {...}}.
        custom: Names of those functions that stand for custom tools.
        choice: "none", "auto", "required", or the name of the function that must be called.
        namespaces: Namespace and name there of those functions that are in one (`flat_name`).
    """

    functions: tuple[Mapping[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    choice: str = "auto"
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def allowed_functions(self) -> tuple[Mapping[str, Any], ...]:
        """Those functions that the choice leaves."""
        if self.choice in ("auto", "required"):
            return self.functions
        return tuple(tool for tool in self.functions if tool["function"]["name"] == self.choice)


class GrammarFormat(msgspec.Struct):
    """Grammar of a custom tool's text, in Responses; in Chat Completions it is within `grammar`."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None
    grammar: "GrammarFormat | None" = None


class NamedTool(msgspec.Struct):
    """Name of a tool."""

    name: str


class AllowedTools(msgspec.Struct):
    """Tools that may be called, a part of those that are given."""

    mode: str = "auto"
    tools: list[dict[str, Any]] = []


class ToolChoice(msgspec.Struct):
    """The tool that must be called, or the tools that may be called, in OpenAI's APIs."""

    type: str = "function"
    name: str | None = None
    namespace: str | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None
    mode: str = "auto"
    tools: list[dict[str, Any]] = []

    @property
    def named(self) -> str | None:
        """Name of the one tool that must be called."""
        inner = self.function or self.custom
        name = self.name if inner is None else inner.name
        return None if name is None else flat_name(name, self.namespace)


def function(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """A function as chat templates take it, without what was not given."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in given.items() if value is not None},
    }


def custom_function(name: str, description: str | None, format: GrammarFormat | None) -> dict[str, Any]:
    """A function that stands for a custom tool: its one parameter is the text."""
    grammar = None if format is None else format.grammar or format
    if grammar is not None and grammar.definition:
        rule = f"The input follows this grammar ({grammar.syntax or 'lark'}):\n{grammar.definition}"
        description = f"{description}\n\n{rule}" if description else rule
    parameters = {
        "type": "object",
        "properties": {_INPUT: {"type": "string"}},
        "required": [_INPUT],
        "additionalProperties": False,
    }
    return function(name, description, parameters)


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a tool for the model, which knows no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def custom_arguments(text: str) -> dict[str, Any]:
    """The arguments of a function that stands for a custom tool."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """The text of a call of a custom tool, from the arguments of its function."""
    given = json.loads(arguments).get(_INPUT)
    return given if isinstance(given, str) else arguments


def apply_tool_choice(
    functions: Sequence[Mapping[str, Any]], custom: frozenset[str], choice: str | ToolChoice | None
) -> Tools:
    """The tools of a request, by its `tool_choice`. Raises ApiError if that names an unknown tool."""
    names = [tool["function"]["name"] for tool in functions]
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        allowed = choice.allowed_tools or AllowedTools(choice.mode, choice.tools)
        wanted = {name for tool in allowed.tools if (name := _name_of(tool))}  # others were left out
        if unknown := sorted(name for name in wanted if name not in names):
            raise invalid("tool_choice", f"{unknown[0][:100]!r} of its allowed tools is not among the tools")
        return apply_tool_choice(
            [tool for tool in functions if tool["function"]["name"] in wanted], custom, allowed.mode
        )
    if isinstance(choice, ToolChoice):
        if choice.named not in names:
            raise invalid("tool_choice", "it names none of the tools")
        choice = choice.named
    choice = "required" if choice == "any" else choice or "auto"
    if choice not in ("none", "auto", "required", *names):
        raise invalid("tool_choice", "it must be none, auto, required, or one of the tools")
    if choice == "required" and not names:
        raise invalid("tool_choice", "there are no tools that can be called")
    return Tools(tuple(functions), custom, choice)


def _name_of(tool: Mapping[str, Any]) -> str:
    given = convert(tool, ToolChoice, ignored=[])
    return given.named or ""

"""Tools of a request: functions, and custom tools, which take text. Other kinds are ignored."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from offspec.server.api_errors import invalid
from offspec.server.parsing import convert

_INPUT = "input"  # parameter of the function that represents a custom tool


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools that an answer may call.

    Args:
        functions: Functions in the format of chat templates: {"type": "function", "function": {...}}.
        custom: Names of the functions that represent custom tools.
        choice: "none", "auto", "required", or the name of the function that must be called.
        namespaces: Namespace and original name by flat name, for functions in a namespace; see `flat_name`.
    """

    functions: tuple[Mapping[str, Any], ...] = ()
    custom: frozenset[str] = frozenset()
    choice: str = "auto"
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def allowed_functions(self) -> tuple[Mapping[str, Any], ...]:
        """Functions that `choice` allows."""
        if self.choice in ("auto", "required"):
            return self.functions
        return tuple(tool for tool in self.functions if tool["function"]["name"] == self.choice)


class GrammarFormat(msgspec.Struct):
    """Grammar of a custom tool's text. Chat Completions nests it in `grammar`; Responses does not."""

    type: str = "text"
    syntax: str | None = None
    definition: str | None = None
    grammar: "GrammarFormat | None" = None


class NamedTool(msgspec.Struct):
    """Name of a tool."""

    name: str


class AllowedTools(msgspec.Struct):
    """Subset of the tools that may be called."""

    mode: str = "auto"
    tools: list[dict[str, Any]] = []


class ToolChoice(msgspec.Struct):
    """OpenAI's `tool_choice` as an object: the tool that must be called, or the tools that may be called."""

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
        """Name of the tool that must be called, or None."""
        inner = self.function or self.custom
        name = self.name if inner is None else inner.name
        return None if name is None else flat_name(name, self.namespace)


def function(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a function in the format of chat templates, without fields that are None."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {
        "type": "function",
        "function": {key: value for key, value in fields.items() if value is not None},
    }


def custom_function(name: str, description: str | None, format: GrammarFormat | None) -> dict[str, Any]:
    """Return the function that represents a custom tool; its only parameter is the text."""
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
    """Return the name of a tool for the model, with the namespace as a prefix."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


def custom_arguments(text: str) -> dict[str, Any]:
    """Return arguments with the text for a function that represents a custom tool."""
    return {_INPUT: text}


def custom_input(arguments: str) -> str:
    """Return the text in the arguments of a function that represents a custom tool. arguments: JSON."""
    text = json.loads(arguments).get(_INPUT)
    return text if isinstance(text, str) else arguments


def apply_tool_choice(
    functions: Sequence[Mapping[str, Any]], custom: frozenset[str], choice: str | ToolChoice | None
) -> Tools:
    """Return the tools of a request for its `tool_choice`. Raises ApiError if it names an unknown tool.

    custom: names of the functions that represent custom tools.
    """
    names = [tool["function"]["name"] for tool in functions]
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        allowed = choice.allowed_tools or AllowedTools(choice.mode, choice.tools)
        # Tools of unsupported types have no name here, and were ignored before.
        chosen = {name for tool in allowed.tools if (name := _name_of(tool))}
        if unknown := sorted(name for name in chosen if name not in names):
            raise invalid("tool_choice", f"the allowed tool {unknown[0][:100]!r} is not in tools")
        return apply_tool_choice(
            [tool for tool in functions if tool["function"]["name"] in chosen], custom, allowed.mode
        )
    if isinstance(choice, ToolChoice):
        if choice.named not in names:
            raise invalid("tool_choice", "it names an unknown tool")
        choice = choice.named
    choice = "required" if choice == "any" else choice or "auto"
    if choice not in ("none", "auto", "required", *names):
        raise invalid("tool_choice", "it must be none, auto, required, or the name of a tool")
    if choice == "required" and not names:
        raise invalid("tool_choice", "there are no tools to call")
    return Tools(tuple(functions), custom, choice)


def _name_of(tool: Mapping[str, Any]) -> str:
    return convert(tool, ToolChoice, ignored=[]).named or ""

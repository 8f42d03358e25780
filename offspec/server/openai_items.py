"""Items and tools of OpenAI's Responses, and the messages and functions that chat templates take for them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import msgspec

from offspec.server.api_errors import missing, unsupported
from offspec.server.openai_messages import (
    CalledCustom,
    CalledFunction,
    Ignore,
    ToolCall,
    ToolName,
    as_call,
    part_text,
)
from offspec.server.tools import (
    GrammarFormat,
    ToolChoice,
    Tools,
    apply_tool_choice,
    custom_function,
    flat_name,
    function,
)


class Part(msgspec.Struct):
    """A part of an item's content. Parts without text, such as pictures, are refused."""

    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    logprobs: Any = None  # accepted, without effect


class Item(msgspec.Struct):
    """A message, a call of a tool, its result, or earlier reasoning; items of other types are left out."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class Tool(msgspec.Struct):
    """A tool, or a namespace with tools. Those that are neither functions nor custom tools are left out."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: GrammarFormat | None = None
    tools: "list[Tool] | None" = None  # of a namespace


def parse_tools(tools: Sequence[Tool], choice: str | ToolChoice | None, ignore: Ignore) -> Tools:
    """The tools of a body. Raises ApiError."""
    found, custom, namespaces = list[dict[str, Any]](), set[str](), dict[str, tuple[str, str]]()
    for where, tool, namespace in _flat(tools, "tools", None):
        if tool.type not in ("function", "custom"):
            ignore(f"tools ({tool.type})")
            continue
        name = flat_name(given := _wanted(tool.name, f"{where}.name"), namespace)
        if namespace:
            namespaces[name] = (namespace, given)
        if tool.type == "function":
            found.append(function(name, tool.description, tool.parameters))
        else:
            found.append(custom_function(name, tool.description, tool.format))
            custom.add(name)
    return replace(apply_tool_choice(found, frozenset(custom), choice), namespaces=namespaces)


def _flat(tools: Sequence[Tool], where: str, namespace: str | None) -> Iterator[tuple[str, Tool, str | None]]:
    """Yield the place of each tool in the body, the tool, and its namespace."""
    for at, tool in enumerate(tools):
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or (), f"{where}[{at}].tools", tool.name)
        else:
            yield f"{where}[{at}]", tool, namespace


def to_chat_messages(instructions: str | None, items: Sequence[Item], ignore: Ignore) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises ApiError.

    Reasoning, text and calls of one turn are one message, as far as they came in that order.
    """
    messages = list[dict[str, Any]]()
    turn: dict[str, Any] | None = None  # of the assistant, while it may go on
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(items):
        if (given := _given(item, f"input[{at}]", ignore)) is None:
            ignore(f"input ({item.type})")
            continue
        begun = turn is not None and (bool(turn["content"]) or "tool_calls" in turn)
        if given["role"] != "assistant":
            turn = None
            messages.append(given)
        elif turn is None or (begun and "tool_calls" not in given):
            turn = given
            messages.append(turn)
        else:
            for name in given.keys() - {"role"}:
                turn[name] = turn[name] + given[name] if name in turn else given[name]
    return messages


def _given(item: Item, where: str, ignore: Ignore) -> dict[str, Any] | None:
    """An item as a message of its own; None for one that says nothing to a model of text."""
    match item.type:
        case "message":
            role = _wanted(item.role, f"{where}.role")
            content = _wanted(item.content, f"{where}.content") if role != "assistant" else item.content or ""
            return {"role": role, "content": _text(content, f"{where}.content")}
        case "reasoning":
            text = _text(item.content or item.summary or "", f"{where}.content")
            return {"role": "assistant", "content": "", "reasoning_content": text}
        case "function_call" | "custom_tool_call":
            return _call(item, where)
        case "function_call_output" | "custom_tool_call_output":
            id = _wanted(item.call_id, f"{where}.call_id")
            output = _text(item.output or "", f"{where}.output", ignore)
            return {"role": "tool", "content": output, "tool_call_id": id}
        case "item_reference":
            raise unsupported(f"{where}.type", "items are not kept by their ids; send the item itself")
    return None


def _call(item: Item, where: str) -> dict[str, Any]:
    name = flat_name(_wanted(item.name, f"{where}.name"), item.namespace)
    id = _wanted(item.call_id, f"{where}.call_id")
    if item.type == "custom_tool_call":
        call = ToolCall(custom=CalledCustom(name, item.input or ""), id=id)
    else:
        call = ToolCall(CalledFunction(name, item.arguments or ""), id=id)
    return {"role": "assistant", "content": "", "tool_calls": [as_call(call)]}


def _wanted(value: Any, field: str) -> Any:
    if value is None:
        raise missing(field)
    return value


def _text(given: str | Sequence[Part], where: str, omit: Ignore | None = None) -> str:
    """The text of an item. omit: parts without text are omitted instead of refused."""
    if isinstance(given, str):
        return given
    texts = ((part.type, part.refusal if part.text is None else part.text) for part in given)
    return "".join(part_text(*part, f"{where}[{at}]", omit) for at, part in enumerate(texts))

"""Input items and tools of OpenAI's Responses API, and their conversion to chat messages and functions."""

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
    """Content part of an item. Parts without text, such as images, are refused."""

    type: str = "input_text"
    text: str | None = None
    refusal: str | None = None
    logprobs: Any = None  # accepted, without effect


class Item(msgspec.Struct):
    """Message, tool call, tool result or earlier reasoning. Items of other types are ignored."""

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
    """Tool, or namespace of tools. Tools that are neither functions nor custom tools are ignored."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    format: GrammarFormat | None = None
    tools: "list[Tool] | None" = None  # tools in a namespace


def parse_tools(tools: Sequence[Tool], choice: str | ToolChoice | None, ignore: Ignore) -> Tools:
    """Return the tools of a request body. Raises ApiError if a tool or the choice is invalid."""
    functions, custom, namespaces = list[dict[str, Any]](), set[str](), dict[str, tuple[str, str]]()
    for path, tool, namespace in _flat(tools, "tools", None):
        if tool.type not in ("function", "custom"):
            ignore(f"tools ({tool.type})")
            continue
        name = flat_name(short_name := _required(tool.name, f"{path}.name"), namespace)
        if namespace:
            namespaces[name] = (namespace, short_name)
        if tool.type == "function":
            functions.append(function(name, tool.description, tool.parameters))
        else:
            functions.append(custom_function(name, tool.description, tool.format))
            custom.add(name)
    return replace(apply_tool_choice(functions, frozenset(custom), choice), namespaces=namespaces)


def _flat(tools: Sequence[Tool], path: str, namespace: str | None) -> Iterator[tuple[str, Tool, str | None]]:
    """Yield each tool with its path in the body and its namespace."""
    for at, tool in enumerate(tools):
        if tool.type == "namespace" and namespace is None:
            yield from _flat(tool.tools or (), f"{path}[{at}].tools", tool.name)
        else:
            yield f"{path}[{at}]", tool, namespace


def to_chat_messages(instructions: str | None, items: Sequence[Item], ignore: Ignore) -> list[dict[str, Any]]:
    """Convert items to messages for the chat template. Raises ApiError if an item is invalid.

    Reasoning, text and calls of one turn are merged into one message if they arrive in that order.
    """
    messages = list[dict[str, Any]]()
    turn: dict[str, Any] | None = None  # message of the assistant that later items may extend
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(items):
        if (message := _to_message(item, f"input[{at}]", ignore)) is None:
            ignore(f"input ({item.type})")
            continue
        begun = turn is not None and (bool(turn["content"]) or "tool_calls" in turn)
        if message["role"] != "assistant":
            turn = None
            messages.append(message)
        elif turn is None or (begun and "tool_calls" not in message):
            turn = message
            messages.append(turn)
        else:
            for name in message.keys() - {"role"}:
                turn[name] = turn[name] + message[name] if name in turn else message[name]
    return messages


def _to_message(item: Item, path: str, ignore: Ignore) -> dict[str, Any] | None:
    """Convert one item to a message, or return None if its type is not supported."""
    match item.type:
        case "message":
            role = _required(item.role, f"{path}.role")
            content = (
                item.content or "" if role == "assistant" else _required(item.content, f"{path}.content")
            )
            return {"role": role, "content": _text(content, f"{path}.content")}
        case "reasoning":
            text = _text(item.content or item.summary or "", f"{path}.content")
            return {"role": "assistant", "content": "", "reasoning_content": text}
        case "function_call" | "custom_tool_call":
            return _call(item, path)
        case "function_call_output" | "custom_tool_call_output":
            id = _required(item.call_id, f"{path}.call_id")
            output = _text(item.output or "", f"{path}.output", ignore)
            return {"role": "tool", "content": output, "tool_call_id": id}
        case "item_reference":
            raise unsupported(f"{path}.type", "items are not stored by id; send the item itself")
    return None


def _call(item: Item, path: str) -> dict[str, Any]:
    name = flat_name(_required(item.name, f"{path}.name"), item.namespace)
    id = _required(item.call_id, f"{path}.call_id")
    if item.type == "custom_tool_call":
        call = ToolCall(custom=CalledCustom(name, item.input or ""), id=id)
    else:
        call = ToolCall(CalledFunction(name, item.arguments or ""), id=id)
    return {"role": "assistant", "content": "", "tool_calls": [as_call(call)]}


def _required(value: Any, field: str) -> Any:
    if value is None:
        raise missing(field)
    return value


def _text(content: str | Sequence[Part], path: str, omit: Ignore | None = None) -> str:
    """Return the text of an item's content.

    omit: callback for parts without text, which are then replaced by a note. None: such parts are refused.
    """
    if isinstance(content, str):
        return content
    texts = ((part.type, part.refusal if part.text is None else part.text) for part in content)
    return "".join(part_text(*part, f"{path}[{at}]", omit) for at, part in enumerate(texts))

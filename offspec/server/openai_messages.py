"""Messages and tools of OpenAI's Chat Completions API, and their conversion for chat templates."""

import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from offspec.server.api_errors import ApiError, invalid, missing, unsupported
from offspec.server.tools import (
    GrammarFormat,
    ToolChoice,
    Tools,
    apply_tool_choice,
    custom_arguments,
    custom_function,
    function,
)

ToolName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
Ignore = Callable[[str], None]  # called with the path of a part that has no effect
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct):
    """Content part of a message. Parts without text, such as images, are refused."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None


class CalledFunction(msgspec.Struct):
    """Function name and arguments of an earlier call."""

    name: str
    arguments: str | dict[str, Any] = ""


class CalledCustom(msgspec.Struct):
    """Name and input of an earlier call of a custom tool."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct):
    """Earlier tool call."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str = ""
    type: Any = None  # ignored: `function` or `custom` determines the type
    index: Any = None  # ignored


class ChatMessage(msgspec.Struct):
    """Message of the conversation so far."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # alternative to reasoning_content, if it is a string
    refusal: str | None = None
    audio: Any = None
    function_call: CalledFunction | None = None


class Function(msgspec.Struct):
    """Function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CustomTool(msgspec.Struct):
    """Custom tool, which takes text as its argument."""

    name: ToolName
    description: str | None = None
    format: GrammarFormat | None = None


class Tool(msgspec.Struct):
    """Tool. Tools that are neither functions nor custom tools are ignored."""

    type: str = "function"
    function: Function | None = None
    custom: CustomTool | None = None


def parse_tools(
    tools: Sequence[Tool],
    functions: Sequence[Function],
    choice: str | ToolChoice | None,
    ignore: Ignore,
) -> Tools:
    """Return the tools of a request body. Raises ApiError if a tool or the choice is invalid.

    Args:
        tools: Field `tools`.
        functions: Legacy field `functions`.
        choice: Field `tool_choice`.
        ignore: Called for each tool of an unsupported type.
    """
    converted, custom = list[dict[str, Any]](), set[str]()
    for at, tool in enumerate([*tools, *(Tool(function=legacy) for legacy in functions)]):
        if tool.function is not None:
            definition = tool.function
            converted.append(function(definition.name, definition.description, definition.parameters))
        elif tool.custom is not None:
            converted.append(custom_function(tool.custom.name, tool.custom.description, tool.custom.format))
            custom.add(tool.custom.name)
        elif tool.type in ("function", "custom"):
            raise missing(f"tools[{at}].{tool.type}")
        else:
            ignore(f"tools ({tool.type})")
    return apply_tool_choice(converted, frozenset(custom), choice)


def omitted(kind: str, ignore: Ignore) -> str:
    """Return the text that replaces an image or a file in a tool result.

    A refusal would end the conversation, because agents repeat all tool results in each request.
    """
    ignore(f"content ({kind})")
    return f"[{kind} omitted: this model reads text only]"


def part_text(kind: str, text: str | None, path: str, omit: Ignore | None) -> str:
    """Return the text of a content part.

    Args:
        kind: Type of the part.
        text: Its text, or None.
        path: Path of the part in the body.
        omit: Called if the part has no text; a note then replaces it. None: such parts are refused.

    Raises:
        ApiError: The part has no text and `omit` is None.
    """
    if text is None and omit is None:
        raise unsupported(path, f"a part of type {kind[:40]!r} is not supported, only text")
    return omitted(kind[:40], omit) if text is None and omit is not None else text or ""


def as_message(message: ChatMessage, at: int, ignore: Ignore) -> dict[str, Any]:
    """Convert a message for the chat template. Raises ApiError for parts that are not text."""
    path = f"messages[{at}]"
    if message.role not in _ROLES:
        raise invalid(f"{path}.role", f"it must be one of {', '.join(_ROLES)}")
    if message.audio is not None:
        raise unsupported(f"{path}.audio")
    role = "tool" if message.role == "function" else message.role
    content, reasoning = _content(message, path, ignore if role == "tool" else None)
    converted: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            converted[name] = value
    if isinstance(message.reasoning, str):
        reasoning = reasoning or message.reasoning
    if reasoning := message.reasoning_content or reasoning:
        converted["reasoning_content"] = reasoning
    calls = [as_call(call) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(as_call(ToolCall(message.function_call)))
    if calls:
        converted["tool_calls"] = calls
    elif message.content is None and message.refusal is None and role not in ("assistant", "tool"):
        raise ApiError("invalid_request", f"{path}.content is missing or empty", field=f"{path}.content")
    return converted


def _content(message: ChatMessage, path: str, omit: Ignore | None) -> tuple[str, str]:
    """Return the text and the reasoning of a message. omit: see `part_text`."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or "", ""
    texts, reasoning = list[str](), list[str]()
    for at, part in enumerate(message.content):
        text = part.text if part.text is not None else part.refusal
        if text is None and part.thinking is not None:
            reasoning.append(_reasoning_text(part.thinking))
        else:
            texts.append(part_text(part.type, text, f"{path}.content[{at}]", omit))
    return "".join(texts), "".join(reasoning)


def _reasoning_text(thinking: Any) -> str:
    """Return the reasoning in a `thinking` part, which is a string or a list of objects with `text`."""
    if isinstance(thinking, list):
        return "".join(str(part.get("text") or "") for part in thinking if isinstance(part, dict))
    return thinking if isinstance(thinking, str) else ""


def as_call(call: ToolCall) -> dict[str, Any]:
    """Convert an earlier call for the chat template, which expects its arguments as an object."""
    if call.custom is not None:
        name, arguments = call.custom.name, custom_arguments(call.custom.input)
    else:
        called = call.function or CalledFunction("")
        name, arguments = called.name, _arguments(called.arguments)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: str | dict[str, Any]) -> Any:
    """Parse arguments as a JSON object, or return them unchanged if that is not possible."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

"""Messages and tools as OpenAI's Chat Completions has them, and as chat templates take them."""

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
Ignore = Callable[[str], None]  # takes the path of a part without effect
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ContentPart(msgspec.Struct):
    """A part of a message's content. Parts without text, such as pictures, are refused."""

    type: str = "text"
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None


class CalledFunction(msgspec.Struct):
    """Function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] = ""


class CalledCustom(msgspec.Struct):
    """Custom tool of an earlier call."""

    name: str
    input: str = ""


class ToolCall(msgspec.Struct):
    """An earlier call of a tool."""

    function: CalledFunction | None = None
    custom: CalledCustom | None = None
    id: str = ""
    type: Any = None  # without effect, as is the index: `function` or `custom` says it
    index: Any = None


class ChatMessage(msgspec.Struct):
    """A message of the conversation so far."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None  # another name for it, if it is text
    refusal: str | None = None
    audio: Any = None
    function_call: CalledFunction | None = None


class Function(msgspec.Struct):
    """A function that may be called."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class CustomTool(msgspec.Struct):
    """A tool whose argument is text."""

    name: ToolName
    description: str | None = None
    format: GrammarFormat | None = None


class Tool(msgspec.Struct):
    """A tool; those that are neither functions nor custom tools are left out."""

    type: str = "function"
    function: Function | None = None
    custom: CustomTool | None = None


def parse_tools(
    tools: Sequence[Tool],
    functions: Sequence[Function],
    choice: str | ToolChoice | None,
    ignore: Ignore,
) -> Tools:
    """The tools of a body. functions: those of the legacy field. Raises ApiError."""
    found, custom = list[dict[str, Any]](), set[str]()
    for at, tool in enumerate([*tools, *(Tool(function=legacy) for legacy in functions)]):
        if tool.function is not None:
            given = tool.function
            found.append(function(given.name, given.description, given.parameters))
        elif tool.custom is not None:
            found.append(custom_function(tool.custom.name, tool.custom.description, tool.custom.format))
            custom.add(tool.custom.name)
        elif tool.type in ("function", "custom"):
            raise missing(f"tools[{at}].{tool.type}")
        else:
            ignore(f"tools ({tool.type})")
    return apply_tool_choice(found, frozenset(custom), choice)


def omitted(kind: str, ignore: Ignore) -> str:
    """The text in place of a picture or a file that a tool returned.

    A refusal would end the conversation: agents send all results again with each request.
    """
    ignore(f"content ({kind})")
    return f"[{kind} omitted: this model reads text only]"


def part_text(kind: str, text: str | None, where: str, omit: Ignore | None) -> str:
    """The text of a part of this kind. Raises ApiError if it has none, unless such parts are omitted."""
    if text is None and omit is None:
        raise unsupported(where, f"a part of type {kind[:40]!r} is not supported, only text")
    return omitted(kind[:40], omit) if text is None and omit is not None else text or ""


def as_message(message: ChatMessage, at: int, ignore: Ignore) -> dict[str, Any]:
    """A message as chat templates take it. Raises ApiError for parts that are not text."""
    where = f"messages[{at}]"
    if message.role not in _ROLES:
        raise invalid(f"{where}.role", f"it must be one of {', '.join(_ROLES)}")
    if message.audio is not None:
        raise unsupported(f"{where}.audio")
    role = "tool" if message.role == "function" else message.role
    content, thought = _content(message, where, ignore if role == "tool" else None)
    given: dict[str, Any] = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            given[name] = value
    if isinstance(message.reasoning, str):
        thought = thought or message.reasoning
    if thought := message.reasoning_content or thought:
        given["reasoning_content"] = thought
    calls = [as_call(call) for call in message.tool_calls or ()]
    if message.function_call is not None:
        calls.append(as_call(ToolCall(message.function_call)))
    if calls:
        given["tool_calls"] = calls
    elif message.content is None and message.refusal is None and role != "assistant":
        raise ApiError("invalid_request", f"{where}.content is missing", field=f"{where}.content")
    return given


def _content(message: ChatMessage, where: str, omit: Ignore | None) -> tuple[str, str]:
    """Text and reasoning of a message. omit: parts without text are omitted instead of refused."""
    if not isinstance(message.content, list):
        return message.content or message.refusal or "", ""
    texts, thoughts = list[str](), list[str]()
    for at, part in enumerate(message.content):
        text = part.text if part.text is not None else part.refusal
        if text is None and part.thinking is not None:
            thoughts.append(_thought(part.thinking))
        else:
            texts.append(part_text(part.type, text, f"{where}.content[{at}]", omit))
    return "".join(texts), "".join(thoughts)


def _thought(given: Any) -> str:
    """Reasoning of a content part: text, or a list of parts with text."""
    if isinstance(given, list):
        return "".join(str(part.get("text") or "") for part in given if isinstance(part, dict))
    return given if isinstance(given, str) else ""


def as_call(call: ToolCall) -> dict[str, Any]:
    """An earlier call; templates expect its arguments as an object."""
    if call.custom is not None:
        name, arguments = call.custom.name, custom_arguments(call.custom.input)
    else:
        made = call.function or CalledFunction("")
        name, arguments = made.name, _arguments(made.arguments)
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: str | dict[str, Any]) -> Any:
    """Arguments as an object, or as they came if they are not JSON of one."""
    if isinstance(given, dict):
        return given
    try:
        parsed = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return given
    return parsed if isinstance(parsed, dict) else given

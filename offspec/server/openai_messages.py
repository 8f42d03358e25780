"""Messages and tools as OpenAI's Chat Completions has them, and as chat templates take them."""

import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offspec.server.faults import Fault, refuse, unsupported


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message's content."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    video_url: Any = None


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(msgspec.Struct, forbid_unknown_fields=True):
    """An earlier call of a tool."""

    function: CalledFunction
    id: str = ""
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class Function(msgspec.Struct, forbid_unknown_fields=True):
    """A function that may be called."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool."""

    function: Function
    type: Literal["function"] = "function"


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    """The name of a function."""

    name: str


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that is to be called."""

    function: FunctionName
    type: Literal["function"] = "function"


def as_tool(tool: Tool) -> dict[str, Any]:
    """A tool as templates take it: what was not given is left out."""
    function = msgspec.structs.asdict(tool.function)
    return {
        "type": "function",
        "function": {name: item for name, item in function.items() if item is not None},
    }


def as_message(message: ChatMessage, at: int) -> dict[str, Any]:
    """A message as chat templates take it. Raises Fault for parts that are no text."""
    where = f"messages[{at}]"
    refuse({f"{where}.{name}": getattr(message, name) for name in ("audio", "function_call")}, {})
    given: dict[str, Any] = {"role": message.role, "content": _content(message, where)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            given[name] = value
    if message.tool_calls:
        given["tool_calls"] = [as_call(call) for call in message.tool_calls]
    elif message.content is None:
        raise Fault("invalid_request", f"{where}.content is missing", field=f"{where}.content")
    return given


def _content(message: ChatMessage, where: str) -> str:
    if not isinstance(message.content, list):
        return message.content or ""
    for at, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            field = f"{where}.content[{at}]"
            raise unsupported(field, f"a part of type {part.type[:40]!r} is not supported, only text")
    return "".join(part.text or "" for part in message.content)


def as_call(call: ToolCall) -> dict[str, Any]:
    """An earlier call; templates expect its arguments as an object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }

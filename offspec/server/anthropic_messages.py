"""Messages and tools as Anthropic's API has them, and as chat templates take them."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offspec.server.faults import Fault, refuse


class TextBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """Text. cache_control: accepted everywhere, without effect."""

    text: str
    cache_control: Any = None
    citations: Any = None


class ThinkingBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking"):
    """What the model thought before. signature: accepted, without effect."""

    thinking: str
    signature: str = ""
    cache_control: Any = None


class RedactedThinkingBlock(
    msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="redacted_thinking"
):
    """Thoughts that nobody can read; they are left out."""

    data: str


class ToolUseBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_use"):
    """An earlier call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None
    caller: Any = None


class ToolResultBlock(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_result"):
    """What came of a call."""

    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool = False
    cache_control: Any = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock


class InputMessage(msgspec.Struct, forbid_unknown_fields=True):
    """A message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    """A tool of the client's own."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None
    input_examples: Any = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


def as_tool(tool: Tool, at: int) -> dict[str, Any]:
    """A tool as templates take it. Raises Fault for what is not supported."""
    where = f"tools[{at}]"
    harmless = {f"{where}.defer_loading": False, f"{where}.allowed_callers": ["direct"]}
    refuse({name: getattr(tool, name.rpartition(".")[2]) for name in harmless}, harmless)
    function = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def as_messages(
    system: str | Sequence[TextBlock] | None, given: Sequence[InputMessage]
) -> list[dict[str, Any]]:
    """Messages as templates take them: results of tools are messages of their own. Raises Fault."""
    messages = list[dict[str, Any]]()
    if system:
        messages.append({"role": "system", "content": _text(system)})
    for at, message in enumerate(given):
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_answer(message.content, f"messages[{at}]"))
        else:
            messages += _question(message.role, message.content, f"messages[{at}]")
    return messages


def _answer(blocks: Sequence[Block], where: str) -> dict[str, Any]:
    """A message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for at, block in enumerate(blocks):
        match block:
            case TextBlock(text=text):
                message["content"] += text
            case ThinkingBlock(thinking=thought):
                message["reasoning_content"] = message.get("reasoning_content", "") + thought
            case ToolUseBlock():
                call = {"name": block.name, "arguments": block.input}
                calls = message.setdefault("tool_calls", [])
                calls.append({"id": block.id, "type": "function", "function": call})
            case ToolResultBlock():
                raise _misplaced(f"{where}.content[{at}]", "tool_result", "the user's")
    return message


def _question(role: str, blocks: Sequence[Block], where: str) -> Iterator[dict[str, Any]]:
    """Messages of a user or of the system, with results of tools."""
    said = list[TextBlock]()
    for at, block in enumerate(blocks):
        match block:
            case TextBlock():
                said.append(block)
            case ToolResultBlock(tool_use_id=id):
                content = ("Error: " if block.is_error else "") + _text(block.content)
                yield {"role": "tool", "content": content, "tool_call_id": id}
            case _:
                kind = str(type(block).__struct_config__.tag)
                raise _misplaced(f"{where}.content[{at}]", kind, "the assistant's")
    if said or not blocks:
        yield {"role": role, "content": _text(said)}


def _text(given: str | Sequence[TextBlock]) -> str:
    return given if isinstance(given, str) else "\n".join(block.text for block in given)


def _misplaced(field: str, kind: str, whose: str) -> Fault:
    message = f"{field}: a block of type {kind} belongs to {whose} messages"
    return Fault("invalid_request", message, field=field)

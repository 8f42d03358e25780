"""Messages and tools of Anthropic's API, and their conversion for chat templates."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from offspec.server.api_errors import ApiError, invalid, missing, unsupported
from offspec.server.openai_messages import Ignore, ToolName, omitted
from offspec.server.tools import Tools, apply_tool_choice, function

_NOT_TEXT = ("image", "document", "audio", "video", "file", "container_upload")
_OF_ASSISTANT = ("thinking", "redacted_thinking", "tool_use")
# Claude Code begins its system prompt with this header and a number that differs in each conversation. The
# model does not need the header, and the number would keep the cached prompt from being reused.
_BILLING = "x-anthropic-billing-header:"


class Block(msgspec.Struct):
    """Part of a message. Blocks of unknown types are ignored; pictures and documents are refused.

    text, thinking: fields of blocks of these types. id, name, input: fields of an earlier call (`tool_use`).
    tool_use_id, content, is_error: fields of a tool result (`tool_result`).
    """

    type: str = "text"
    text: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str | None = None
    content: "str | list[Block]" = ""
    is_error: bool = False
    source: Any = None  # of pictures and documents


class InputMessage(msgspec.Struct):
    """Message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = ""


class Tool(msgspec.Struct):
    """Tool definition. Tools of Anthropic's servers have no schema and are ignored."""

    name: ToolName | None = None
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """Choice of the tools to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def parse_tools(tools: Sequence[Tool], choice: ToolChoice | None, ignore: Ignore) -> Tools:
    """Return the tools of a body. Raises ApiError if a tool or the choice is invalid."""
    found = list[dict[str, Any]]()
    for at, tool in enumerate(tools):
        if tool.type != "custom":
            ignore(f"tools ({tool.type})")
            continue
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise missing(f"tools[{at}].{name}")
        found.append(function(tool.name or "", tool.description, tool.input_schema))
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise missing("tool_choice.name")
    wanted = None if choice is None else choice.name if choice.type == "tool" else choice.type
    return apply_tool_choice(found, frozenset(), wanted)


def to_chat_messages(
    system: str | Sequence[Block] | None, given: Sequence[InputMessage], ignore: Ignore
) -> list[dict[str, Any]]:
    """Return messages for the chat template, with tool results as separate messages. Raises ApiError."""
    messages = list[dict[str, Any]]()
    if system and not isinstance(system, str):
        system = [block for block in system if not (block.text or "").startswith(_BILLING)]
    if system:
        messages.append({"role": "system", "content": _text(system, "system", ignore)})
    for at, message in enumerate(given):
        where = f"messages[{at}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_answer(message.content, where, ignore))
        else:
            messages += _question(message.role, message.content, where, ignore)
    return messages


def _answer(blocks: Sequence[Block], where: str, ignore: Ignore) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for at, block in enumerate(blocks):
        match block.type:
            case "thinking":
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case "redacted_thinking":
                pass  # encrypted
            case "tool_use":
                call = {"name": block.name, "arguments": block.input}
                calls = message.setdefault("tool_calls", [])
                calls.append({"id": block.id, "type": "function", "function": call})
            case "tool_result":
                raise _misplaced(f"{where}[{at}]", block.type, "the user's")
            case _:
                message["content"] += _block_text(block, f"{where}[{at}]", ignore) or ""
    return message


def _question(role: str, blocks: Sequence[Block], where: str, ignore: Ignore) -> Iterator[dict[str, Any]]:
    """Yield messages of the user or the system, and tool results."""
    texts = list[str]()
    result = any(block.type == "tool_result" for block in blocks)  # a file may follow its tool result
    for at, block in enumerate(blocks):
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise missing(f"{where}[{at}].tool_use_id")
            content = _text(block.content, f"{where}[{at}].content", ignore, result=True)
            content = f"Error: {content}" if block.is_error else content
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        elif block.type in _OF_ASSISTANT:
            raise _misplaced(f"{where}[{at}]", block.type, "the assistant's")
        elif (text := _block_text(block, f"{where}[{at}]", ignore, result)) is not None:
            texts.append(text)
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _text(given: str | Sequence[Block], where: str, ignore: Ignore, result: bool = False) -> str:
    if isinstance(given, str):
        return given
    texts = [_block_text(block, f"{where}[{at}]", ignore, result) for at, block in enumerate(given)]
    return "\n".join(text for text in texts if text is not None)


def _block_text(block: Block, where: str, ignore: Ignore, result: bool = False) -> str | None:
    """Return the text of a block, or None for an unknown type without text.

    Raises ApiError for pictures and files, except in tool results, where they are omitted.
    """
    if block.type == "document" and isinstance(block.source, dict) and block.source.get("type") == "text":
        return str(block.source.get("data") or "")
    if block.type in _NOT_TEXT and result:
        return omitted(block.type, ignore)
    if block.type in _NOT_TEXT:
        raise unsupported(where, f"a block of type {block.type!r} is not supported, only text")
    if block.text is not None:
        return block.text
    if block.type == "text":
        raise missing(f"{where}.text")
    if block.content and block.type == "search_result":
        return _text(block.content, where, ignore)
    ignore(f"content ({block.type})")
    return None


def _misplaced(field: str, kind: str, whose: str) -> ApiError:
    return invalid(field, f"a block of type {kind} belongs to {whose} messages")

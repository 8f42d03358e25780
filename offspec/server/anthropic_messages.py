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
# header is dropped: the model does not need it, and the number would prevent reuse of the cached prompt.
_BILLING = "x-anthropic-billing-header:"


class Block(msgspec.Struct):
    """Content block of a message. Blocks of unknown types are ignored; images and documents are refused.

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
    source: Any = None  # field of images and documents


class InputMessage(msgspec.Struct):
    """Message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = ""


class Tool(msgspec.Struct):
    """Tool definition. Anthropic's server tools have no schema and are ignored."""

    name: ToolName | None = None
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """Anthropic's `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def parse_tools(tools: Sequence[Tool], choice: ToolChoice | None, ignore: Ignore) -> Tools:
    """Return the tools of a body. Raises ApiError if a tool or the choice is invalid."""
    functions = list[dict[str, Any]]()
    for at, tool in enumerate(tools):
        if tool.type != "custom":
            ignore(f"tools ({tool.type})")
            continue
        for name in ("name", "input_schema"):
            if getattr(tool, name) is None:
                raise missing(f"tools[{at}].{name}")
        functions.append(function(tool.name or "", tool.description, tool.input_schema))
    if choice is not None and choice.type == "tool" and choice.name is None:
        raise missing("tool_choice.name")
    name_or_mode = None if choice is None else choice.name if choice.type == "tool" else choice.type
    return apply_tool_choice(functions, frozenset(), name_or_mode)


def to_chat_messages(
    system: str | Sequence[Block] | None, input_messages: Sequence[InputMessage], ignore: Ignore
) -> list[dict[str, Any]]:
    """Return messages for the chat template, with tool results as separate messages. Raises ApiError."""
    messages = list[dict[str, Any]]()
    if system and not isinstance(system, str):
        system = [block for block in system if not (block.text or "").startswith(_BILLING)]
    if system:
        messages.append({"role": "system", "content": _text(system, "system", ignore)})
    for at, message in enumerate(input_messages):
        path = f"messages[{at}].content"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant_message(message.content, path, ignore))
        else:
            messages += _user_messages(message.role, message.content, path, ignore)
    return messages


def _assistant_message(blocks: Sequence[Block], path: str, ignore: Ignore) -> dict[str, Any]:
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
                raise _misplaced(f"{path}[{at}]", block.type, "the user's")
            case _:
                message["content"] += _block_text(block, f"{path}[{at}]", ignore) or ""
    return message


def _user_messages(role: str, blocks: Sequence[Block], path: str, ignore: Ignore) -> Iterator[dict[str, Any]]:
    """Yield tool results and the message of the user or the system."""
    texts = list[str]()
    result = any(block.type == "tool_result" for block in blocks)  # a file may follow its tool result
    for at, block in enumerate(blocks):
        if block.type == "tool_result":
            if block.tool_use_id is None:
                raise missing(f"{path}[{at}].tool_use_id")
            content = _text(block.content, f"{path}[{at}].content", ignore, result=True)
            content = f"Error: {content}" if block.is_error else content
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        elif block.type in _OF_ASSISTANT:
            raise _misplaced(f"{path}[{at}]", block.type, "the assistant's")
        elif (text := _block_text(block, f"{path}[{at}]", ignore, result)) is not None:
            texts.append(text)
    if texts or not blocks:
        yield {"role": role, "content": "\n".join(texts)}


def _text(content: str | Sequence[Block], path: str, ignore: Ignore, result: bool = False) -> str:
    if isinstance(content, str):
        return content
    texts = [_block_text(block, f"{path}[{at}]", ignore, result) for at, block in enumerate(content)]
    return "\n".join(text for text in texts if text is not None)


def _block_text(block: Block, path: str, ignore: Ignore, result: bool = False) -> str | None:
    """Return the text of a block, or None for an unknown type without text.

    Raises ApiError for images and files. In tool results, a note replaces them instead.
    """
    if block.type == "document" and isinstance(block.source, dict) and block.source.get("type") == "text":
        return str(block.source.get("data") or "")
    if block.type in _NOT_TEXT and result:
        return omitted(block.type, ignore)
    if block.type in _NOT_TEXT:
        raise unsupported(path, f"a block of type {block.type!r} is not supported, only text")
    if block.text is not None:
        return block.text
    if block.type == "text":
        raise missing(f"{path}.text")
    if block.content and block.type == "search_result":
        return _text(block.content, path, ignore)
    ignore(f"content ({block.type})")
    return None


def _misplaced(field: str, kind: str, whose: str) -> ApiError:
    return invalid(field, f"a block of type {kind} belongs to {whose} messages")

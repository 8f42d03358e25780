"""Messages and tools as Anthropic's API has them, and as chat templates take them."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from offspec.server.faults import Fault, invalid, missing, unsupported
from offspec.server.openai_messages import Ignore, ToolName, omitted
from offspec.server.tools import Tools, choose, function

_NOT_TEXT = ("image", "document", "audio", "video", "file", "container_upload")
_OF_ASSISTANT = ("thinking", "redacted_thinking", "tool_use")
# Claude Code begins its system prompt with this and a number that differs in each conversation. It is not for
# the model, and would have the whole prompt computed again.
_BILLING = "x-anthropic-billing-header:"


class Block(msgspec.Struct):
    """A part of a message. Blocks of unknown types are left out; pictures and documents are refused.

    text, thinking: of blocks of these types. id, name, input: of an earlier call (`tool_use`). tool_use_id,
    content, is_error: of its result (`tool_result`).
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
    """A message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block] = ""


class Tool(msgspec.Struct):
    """A tool. Those of Anthropic's servers, which have no schema, are left out."""

    name: ToolName | None = None
    type: str = "custom"
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(msgspec.Struct):
    """The tools that are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


def tools_of(tools: Sequence[Tool], choice: ToolChoice | None, ignore: Ignore) -> Tools:
    """The tools of a body. Raises Fault."""
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
    return choose(found, frozenset(), wanted)


def as_messages(
    system: str | Sequence[Block] | None, given: Sequence[InputMessage], ignore: Ignore
) -> list[dict[str, Any]]:
    """Messages as templates take them: results of tools are messages of their own. Raises Fault."""
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
                pass  # nobody can read it
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
    """Messages of a user or of the system, with results of tools."""
    texts = list[str]()
    result = any(block.type == "tool_result" for block in blocks)  # a file may follow the result it is of
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
    """The text of a block; None for an unknown type without text.

    Raises Fault for pictures and files, which are omitted in the result of a tool.
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


def _misplaced(field: str, kind: str, whose: str) -> Fault:
    return invalid(field, f"a block of type {kind} belongs to {whose} messages")

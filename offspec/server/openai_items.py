"""Items of OpenAI's Responses, and the messages that chat templates take in their place."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from offspec.server.faults import Fault, refuse, unsupported
from offspec.server.openai_messages import CalledFunction, ToolCall, as_call

_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Part(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an item's content. annotations, logprobs: accepted, without effect."""

    type: str
    text: str | None = None
    annotations: Any = None
    logprobs: Any = None
    refusal: Any = None
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None


class Item(msgspec.Struct, forbid_unknown_fields=True):
    """A message, a call of a tool, what came of it, or what the model thought before.

    id, status, phase, encrypted_content: accepted, without effect.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    encrypted_content: str | None = None
    caller: Any = None
    namespace: str | None = None


class FunctionTool(msgspec.Struct, forbid_unknown_fields=True):
    """A function that may be called."""

    type: Literal["function"]
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ChosenTool(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that is to be called."""

    type: Literal["function"]
    name: str


def as_tool(tool: FunctionTool, at: int) -> dict[str, Any]:
    """A tool as templates take it. Raises Fault for what is not supported."""
    harmless = {"defer_loading": False, "allowed_callers": ["direct"]}
    given = {f"tools[{at}].{name}": getattr(tool, name) for name in harmless}
    refuse(given, {f"tools[{at}].{name}": value for name, value in harmless.items()})
    names = ("name", "description", "parameters", "strict")
    known = {name: value for name in names if (value := getattr(tool, name)) is not None}
    return {"type": "function", "function": known}


def as_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Messages as templates take them. Raises Fault.

    What the model thought, said and called in one turn is one message, as far as it came in that order.
    """
    messages = list[dict[str, Any]]()
    turn: dict[str, Any] | None = None  # of the assistant, while it may go on
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(items):
        given = _given(item, f"input[{at}]")
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


def _given(item: Item, where: str) -> dict[str, Any]:
    """An item as a message of its own."""
    match item.type:
        case "message":
            role = _wanted(item.role, f"{where}.role")
            content = _wanted(item.content, f"{where}.content")
            return {"role": role, "content": _text(content, f"{where}.content")}
        case "reasoning":
            thought = item.content or item.summary or ""
            text = _text(thought, f"{where}.content")
            return {"role": "assistant", "content": "", "reasoning_content": text}
        case "function_call":
            name = _wanted(item.name, f"{where}.name")
            call = CalledFunction(name, _wanted(item.arguments, f"{where}.arguments"))
            id = _wanted(item.call_id, f"{where}.call_id")
            return {"role": "assistant", "content": "", "tool_calls": [as_call(ToolCall(call, id))]}
    output = _wanted(item.output, f"{where}.output")
    id = _wanted(item.call_id, f"{where}.call_id")
    return {"role": "tool", "content": _text(output, f"{where}.output"), "tool_call_id": id}


def _wanted(value: Any, field: str) -> Any:
    if value is None:
        raise Fault("invalid_request", f"{field} is missing", field=field, code="missing_required_parameter")
    return value


def _text(given: str | Sequence[Part], where: str) -> str:
    if isinstance(given, str):
        return given
    for at, part in enumerate(given):
        if part.type not in _TEXTS or part.text is None:
            field = f"{where}[{at}]"
            raise unsupported(field, f"a part of type {part.type[:40]!r} is not supported, only text")
    return "".join(part.text or "" for part in given)

"""Anthropic's Messages: POST /v1/messages and /v1/messages/count_tokens."""

import json
import secrets
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.answer import Answer
from offspec.server.anthropic_events import Blocks, usage_body
from offspec.server.anthropic_messages import InputMessage, TextBlock, Tool, as_messages, as_tool
from offspec.server.exchange import Ask, Ended, Usage
from offspec.server.faults import Fault, Kind, parse, refuse
from offspec.server.forced_call import checked_choice
from offspec.server.formats import checked
from offspec.server.openai_common import MOST_MESSAGES, ChoosingTokens, Positive, Texts
from offspec.server.responses import EventStream, event, json_response, whole
from offspec.server.service import Service

_TYPES: dict[Kind, str] = {
    "invalid_request": "invalid_request_error",
    "authentication": "authentication_error",
    "permission": "permission_error",
    "not_found": "not_found_error",
    "timeout": "timeout_error",
    "too_large": "request_too_large",
    "rate_limit": "rate_limit_error",
    "unavailable": "overloaded_error",
    "server": "api_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_HARMLESS: dict[str, Any] = {
    "stop": None,
    "container": None,
    "inference_geo": None,
    "speed": "standard",
    "mcp_servers": [],
    "context_management": None,
}


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """Whether to think first. budget_tokens: accepted, without effect."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Positive | None = None
    display: Literal["summarized"] | None = None


class ToolChoice(msgspec.Struct, forbid_unknown_fields=True):
    """Which tools are to be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class OutputFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the answer must look like."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """How to answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class Counted(ChoosingTokens, kw_only=True, forbid_unknown_fields=True):
    """What a prompt is made of."""

    model: str
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MOST_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Accepted, without effect.
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None
    # Known, and accepted only with the value that changes nothing.
    container: Any = None
    inference_geo: Any = None
    speed: Any = None
    mcp_servers: Any = None
    context_management: Any = None


class Body(Counted, kw_only=True, forbid_unknown_fields=True):
    """A request."""

    max_tokens: Positive
    stop_sequences: Texts | None = None
    stream: bool | None = None


async def create(request: Request) -> Response:
    """An answer to a conversation."""
    service: Service = request.app.state.service
    body = parse(await request.body(), Body)
    service.check_name(body.model)
    stop = {} if body.stop_sequences is None else {"stop": body.stop_sequences}
    answer = await service.answer(_ask(body, service, max_tokens=body.max_tokens, **stop))
    if body.stream:
        ping = event({"type": "ping"}, "ping")
        return EventStream(answer, _events(answer, body), _error_event, ping)
    return await whole(request.receive, answer, lambda answer: _message(answer, body))


async def count_tokens(request: Request) -> Response:
    """How many tokens a prompt has."""
    service: Service = request.app.state.service
    body = parse(await request.body(), Counted)
    service.check_name(body.model)
    return json_response({"input_tokens": len(await service.encode(_ask(body, service)))})


def error_body(fault: Fault) -> dict[str, Any]:
    """A fault in Anthropic's shape."""
    return {"type": "error", "error": {"type": _TYPES[fault.kind], "message": fault.message}}


def _error_event(fault: Fault) -> bytes:
    return event(error_body(fault), "error")


def _ask(body: Counted, service: Service, **more: Any) -> Ask:
    """What a body asks for. Raises Fault for what is not supported."""
    refuse({name: getattr(body, name) for name in _HARMLESS}, _HARMLESS)
    output = body.output_config or OutputConfig()
    if output.format is not None:
        more["format"] = checked("output_config.format.schema", "json_schema", output.format.schema)
    template = dict(body.chat_template_kwargs or {})
    if output.effort is not None:
        template.setdefault("reasoning_effort", output.effort)
    if body.thinking is not None and body.thinking.type != "adaptive":
        template.setdefault("enable_thinking", body.thinking.type == "enabled")
    return Ask(
        prompt=as_messages(body.system, body.messages),
        params=body.sampling(service.defaults, **more),
        tools=tuple(as_tool(tool, at) for at, tool in enumerate(body.tools or ())),
        tool_choice=_tool_choice(body),
        parallel_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        template=template,
    )


def _tool_choice(body: Counted) -> str:
    choice, names = body.tool_choice or ToolChoice("auto"), [tool.name for tool in body.tools or ()]
    if choice.type == "tool":
        return checked_choice("auto", choice.name or "", names)
    return checked_choice("required" if choice.type == "any" else choice.type, None, names)


async def _told(answer: Answer, body: Body) -> AsyncGenerator[dict[str, Any], None]:
    """The events of an answer."""
    blocks, ending = Blocks(), dict[str, Any]()
    head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": body.model}
    usage: dict[str, Any] = {"input_tokens": answer.prompt_tokens, "output_tokens": 0}
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield {"type": "message_start", "message": {**head, **empty}}
    async for item in answer:
        match item:
            case Ended():
                reason = "stop_sequence" if item.stop is not None else _REASONS[item.reason]
                ending = {"stop_reason": reason, "stop_sequence": item.stop}
            case Usage():
                usage = usage_body(item)
            case _:
                for told in blocks.events(item):
                    yield told
    for told in blocks.close():
        yield told
    yield {"type": "message_delta", "delta": ending, "usage": usage}
    yield {"type": "message_stop"}


async def _events(answer: Answer, body: Body) -> AsyncGenerator[bytes, None]:
    async for told in _told(answer, body):
        yield event(told, told["type"])


async def _message(answer: Answer, body: Body) -> dict[str, Any]:
    """A whole answer: the events, put together."""
    message, blocks, inputs = dict[str, Any](), list[dict[str, Any]](), dict[int, str]()
    async for told in _told(answer, body):
        match told["type"]:
            case "message_start":
                message = told["message"]
            case "content_block_start":
                blocks.append(told["content_block"])
            case "content_block_delta":
                _, (name, value) = told["delta"].items()
                if name == "partial_json":
                    inputs[told["index"]] = inputs.get(told["index"], "") + value
                else:
                    blocks[told["index"]][name] += value
            case "message_delta":
                message |= {**told["delta"], "usage": told["usage"]}
    for index, text in inputs.items():
        blocks[index]["input"] = json.loads(text)
    return {**message, "content": blocks}

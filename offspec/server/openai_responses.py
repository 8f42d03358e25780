"""OpenAI's Responses API: POST /v1/responses."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.responses import Response

from offspec.core.config import SamplingParams
from offspec.core.constraint import Constraint
from offspec.server.api_errors import ApiError, invalid, refuse
from offspec.server.endpoint import ApiRequest
from offspec.server.openai_common import (
    MAX_MESSAGES,
    Limit,
    SamplingFields,
    StreamOptions,
    answer_limit,
    template_variables,
)
from offspec.server.openai_items import Item, Tool, parse_tools, to_chat_messages
from offspec.server.openai_messages import Ignore
from offspec.server.openai_responses_reply import Object, ResponseReply
from offspec.server.parsing import convert
from offspec.server.protocol import GenerateRequest
from offspec.server.reply import respond
from offspec.server.service import Service
from offspec.server.stored_responses import StoredResponses, new_id
from offspec.server.structured_outputs import checked_constraint
from offspec.server.tools import ToolChoice

_LOGPROBS = "message.output_text.logprobs"
_HARMLESS: dict[str, Any] = {"background": False, "conversation": None, "prompt": None}
_ANSWER = 4  # truncation reserves up to 1/4 of the context for the answer


class TextFormat(Struct):
    """Format of the answer. name, description: ignored."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: Any = None
    description: Any = None


class TextConfig(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None


class Reasoning(Struct):
    """Reasoning options."""

    effort: str | None = None


class Body(SamplingFields, kw_only=True):
    """Body of a request."""

    model: str = ""
    input: str | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Limit | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # Accepted only with the value of `_HARMLESS`.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


async def create(api_request: ApiRequest[Body]) -> Response:
    """Answer the items of a request, which follow those of the previous response if it names one."""
    service, body, raw_body = api_request.service, api_request.body, api_request.raw_body
    store, items = service.responses, raw_body["input"]
    if isinstance(body.input, str):
        items = _user_message(body.input)
    items = [*await _earlier_items(store, body), *items]
    request = _generate_request(body, _convert_items(items), service.defaults, api_request.ignore)
    if body.truncation == "auto":
        request = await _truncate(service, request)
    reply_store = store if body.store is not False else None
    reply = ResponseReply(body.stream, _response(body, raw_body, request), request, items, reply_store)
    return respond(await service.answer(request), reply)


async def _earlier_items(store: StoredResponses, body: Body) -> list[Object]:
    """Return the items up to the end of the previous response. Raises ApiError if it is not stored."""
    if (id := body.previous_response_id) is None:
        return []
    stored = await asyncio.to_thread(store.get, id)
    with suppress(ApiError):  # the file was damaged, or written by another version
        if stored is not None:
            _convert_items(stored.items)
            return stored.items
    why = f"there is no stored response {id[:100]!r}; it may have expired"
    raise invalid("previous_response_id", why, "previous_response_not_found")


def _convert_items(items: Sequence[Object]) -> list[Item]:
    """Convert JSON objects to items. Raises ApiError if one is invalid."""
    return convert(list(items), list[Item], ignored=[])


def to_request(body: Body, defaults: SamplingParams, ignore: Ignore) -> GenerateRequest:
    """Convert a body to a generation request, without the items of the previous response. Raises ApiError."""
    items = _convert_items(_user_message(body.input)) if isinstance(body.input, str) else body.input
    return _generate_request(body, items, defaults, ignore)


def _user_message(text: str) -> list[Object]:
    """Return the items of a request whose input is text."""
    return [{"role": "user", "content": text}]


def _generate_request(
    body: Body, items: Sequence[Item], defaults: SamplingParams, ignore: Ignore
) -> GenerateRequest:
    """Convert a body and all items to a generation request. Raises ApiError for unsupported fields."""
    refuse(body, _HARMLESS)
    text = body.text or TextConfig()
    effort = body.reasoning.effort if body.reasoning else None
    with_logprobs = _LOGPROBS in (body.include or ())
    return GenerateRequest(
        prompt=to_chat_messages(body.instructions, items, ignore),
        params=body.sampling(
            defaults,
            max_tokens=answer_limit(body.max_output_tokens),
            logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            format=_format(text.format or TextFormat()),
        ),
        tools=parse_tools(body.tools or (), body.tool_choice, ignore),
        parallel_calls=body.parallel_tool_calls is not False,
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort),
    )


def _format(format: TextFormat) -> Constraint | None:
    match format.type:
        case "text":
            return None
        case "json_object":
            return Constraint("json_object")
    return checked_constraint(
        "text.format.schema", "json_schema", {} if format.schema is None else format.schema
    )


def _response(body: Body, raw_body: Object, request: GenerateRequest) -> Object:
    """Return a response object without output. raw_body: JSON of the body."""
    format = {"type": "text"} | ((raw_body.get("text") or {}).get("format") or {})
    return {
        "id": new_id(),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": raw_body.get("metadata") or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": request.parallel_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": request.params.temperature,
        "text": {"format": format},
        "tool_choice": raw_body.get("tool_choice") or "auto",
        "tools": raw_body.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": request.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


async def _truncate(service: Service, request: GenerateRequest) -> GenerateRequest:
    """Drop as few of the earliest turns as necessary to leave room for the answer. Raises ApiError.

    A turn begins with a message of the user. System messages before the first turn are kept.
    """
    context = service.engine.context
    most = context - min(request.params.max_tokens, context // _ANSWER)
    messages: Sequence[Mapping[str, Any]] = request.prompt  # type: ignore[assignment]
    turns = [at for at, message in enumerate(messages) if message["role"] == "user"]
    head = [message for message in messages[: turns[0] if turns else 0] if message["role"] != "assistant"]

    def tail(first: int) -> GenerateRequest:
        return request if first == 0 else replace(request, prompt=[*head, *messages[turns[first] :]])

    low, high = 0, max(len(turns) - 1, 0)  # bisect the smallest sufficient number of turns to drop
    while low < high:
        middle = (low + high) // 2
        if await service.count_tokens(tail(middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return tail(low)

"""OpenAI's Responses: POST /v1/responses."""

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
_ANSWER = 4  # an answer that may be long has at least this part of the context


class TextFormat(Struct):
    """The format of the answer. name, description: accepted, without effect."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: dict[str, Any] | None = None
    name: Any = None
    description: Any = None


class TextConfig(Struct):
    """Options of the answer's text."""

    format: TextFormat | None = None


class Reasoning(Struct):
    """Options of reasoning."""

    effort: str | None = None


class Body(SamplingFields, kw_only=True):
    """A request."""

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
    # Accepted only with a value that changes nothing.
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


async def create(request: ApiRequest[Body]) -> Response:
    """Answer items, after those of the response that the request continues."""
    service, body, given = request.service, request.body, request.given
    store, items = service.responses, given["input"]
    if isinstance(body.input, str):
        items = _question(body.input)
    items = [*await _earlier(store, body), *items]
    ask = _ask(body, _items(items), service.defaults, request.ignore)
    if body.truncation == "auto":
        ask = await _truncated(service, ask)
    kept = store if body.store is not False else None
    reply = ResponseReply(body.stream, _response(body, given, ask), ask, items, kept)
    return respond(await service.answer(ask), reply)


async def _earlier(store: StoredResponses, body: Body) -> list[Object]:
    """Return the items up to the end of the response that a request continues. Raises ApiError."""
    if (id := body.previous_response_id) is None:
        return []
    found = await asyncio.to_thread(store.get, id)
    with suppress(ApiError):  # it was damaged, or written by another version
        if found is not None:
            _items(found.items)
            return found.items
    why = f"there is no stored response {id[:100]!r}; it may have expired"
    raise invalid("previous_response_id", why, "previous_response_not_found")


def _items(given: Sequence[Object]) -> list[Item]:
    """Items as they are kept. Raises ApiError."""
    return convert(list(given), list[Item], ignored=[])


def to_request(body: Body, defaults: SamplingParams, ignore: Ignore) -> GenerateRequest:
    """The request of a body, without the items of an earlier response. Raises ApiError."""
    items = _items(_question(body.input)) if isinstance(body.input, str) else body.input
    return _ask(body, items, defaults, ignore)


def _question(text: str) -> list[Object]:
    """The items of a request whose input is a text."""
    return [{"role": "user", "content": text}]


def _ask(body: Body, items: Sequence[Item], defaults: SamplingParams, ignore: Ignore) -> GenerateRequest:
    """The request of a body. Raises ApiError for what is not supported."""
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


def _format(given: TextFormat) -> Constraint | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return Constraint("json_object")
    return checked_constraint(
        "text.format.schema", "json_schema", {} if given.schema is None else given.schema
    )


def _response(body: Body, given: Object, ask: GenerateRequest) -> Object:
    """A response before there is an answer. given: the body as it came."""
    format = {"type": "text"} | ((given.get("text") or {}).get("format") or {})
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
        "metadata": given.get("metadata") or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": ask.parallel_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": body.store is not False,
        "temperature": ask.params.temperature,
        "text": {"format": format},
        "tool_choice": given.get("tool_choice") or "auto",
        "tools": given.get("tools") or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": ask.params.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
    }


async def _truncated(service: Service, ask: GenerateRequest) -> GenerateRequest:
    """Return the request with as many of its latest turns as leave room for the answer. Raises ApiError.

    A turn begins with a message of the user. Messages of the system before the first turn stay.
    """
    context = service.engine.context
    most = context - min(ask.params.max_tokens, context // _ANSWER)
    messages: Sequence[Mapping[str, Any]] = ask.prompt  # type: ignore[assignment]
    turns = [at for at, message in enumerate(messages) if message["role"] == "user"]
    head = [message for message in messages[: turns[0] if turns else 0] if message["role"] != "assistant"]

    def tail(first: int) -> GenerateRequest:
        return ask if first == 0 else replace(ask, prompt=[*head, *messages[turns[first] :]])

    low, high = 0, max(len(turns) - 1, 0)  # the number of turns to leave out: the least that is enough
    while low < high:
        middle = (low + high) // 2
        if await service.count_tokens(tail(middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return tail(low)

"""OpenAI's Responses: POST /v1/responses, and those that are kept."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import Response

from offspec.core.constraint import Constraint
from offspec.core.errors import OffspecError
from offspec.server.delta_stream import DeltaStream
from offspec.server.exchange import Ask
from offspec.server.faults import Fault, refuse
from offspec.server.formats import checked
from offspec.server.openai_common import answer_limit, template_variables
from offspec.server.openai_items import Item, as_messages, tools_of
from offspec.server.openai_messages import Ignore
from offspec.server.openai_response_body import HARMLESS, LOGPROBS, REFUSED, Body, TextConfig, TextFormat
from offspec.server.openai_response_events import ResponseEvents, Told
from offspec.server.parsing import convert, parse
from offspec.server.reading import read_body, report_ignored
from offspec.server.responses import EventStream, WholeAnswer, event, json_response
from offspec.server.service import Service
from offspec.server.stored_responses import Stored, StoredResponses, fresh_id
from offspec.server.truncation import truncated

log = logging.getLogger("offspec.server")


async def create(request: Request) -> Response:
    """Answer items, after those of the response that the request continues."""
    service: Service = request.app.state.service
    kept: StoredResponses = request.app.state.responses
    body = await read_body(request, Body)
    body.model = service.check_name(body.model)
    earlier = await _earlier(kept, body)
    given: Told = parse(await request.body())
    items: list[Told] = given["input"]
    if isinstance(body.input, str):
        items = [{"role": "user", "content": body.input}]
    items = [*earlier, *items]
    ask = _ask(body, service, items, lambda path: report_ignored(request, (path,)))
    if body.truncation == "auto":
        ask = await truncated(service, ask)
    events = ResponseEvents(_response(body, given, ask), LOGPROBS in (body.include or ()), ask.tools)
    answer = await service.answer(ask)
    told = _told(answer, events, kept if body.store is not False else None, items)
    if body.stream:
        fail, wait = (lambda fault: _event(events.fail(fault))), (lambda: _event(events.wait()))
        return EventStream(answer, _bytes(told), fail, wait)
    return WholeAnswer(answer, _whole(told), lambda fault: events.fail(fault)["response"])


async def retrieve(request: Request) -> Response:
    """A response that is kept."""
    return json_response((await kept_response(request)).response)


async def delete(request: Request) -> Response:
    """Keep a response no longer."""
    await kept_response(request)
    id: str = request.path_params["id"]
    await asyncio.to_thread(request.app.state.responses.remove, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def kept_response(request: Request) -> Stored:
    """The response that a path names. Raises Fault if it is not kept."""
    id: str = request.path_params["id"]
    found: Stored | None = await asyncio.to_thread(request.app.state.responses.get, id)
    if found is None:
        raise Fault("not_found", f"there is no response {id[:100]!r}, or it is kept no longer", field="id")
    return found


async def _earlier(kept: StoredResponses, body: Body) -> list[Told]:
    """The items up to the end of the response that a request goes on from. Raises Fault."""
    if (id := body.previous_response_id) is None:
        return []
    found = await asyncio.to_thread(kept.get, id)
    with suppress(Fault):  # it was damaged, or written by another version
        if found is not None:
            _items(found.items)
            return found.items
    raise Fault(
        "invalid_request",
        f"previous_response_id: there is no response {id[:100]!r}, or it is kept no longer",
        field="previous_response_id",
        code="previous_response_not_found",
    )


def _items(given: Sequence[Told]) -> list[Item]:
    """Items as they are kept. Raises Fault."""
    return convert(list(given), list[Item], ignored=[])


def _ask(body: Body, service: Service, items: Sequence[Told], ignore: Ignore) -> Ask:
    """The request of a body. Raises Fault for what is not supported."""
    refuse({name: getattr(body, name) for name in REFUSED}, HARMLESS)
    text = body.text or TextConfig()
    effort = body.reasoning.effort if body.reasoning else None
    with_logprobs = LOGPROBS in (body.include or ())
    return Ask(
        prompt=as_messages(body.instructions, _items(items), ignore),
        params=body.sampling(
            service.defaults,
            max_tokens=answer_limit(body.max_output_tokens),
            logprobs=(body.top_logprobs or 0) if with_logprobs else None,
            format=_format(text.format or TextFormat()),
        ),
        tools=tools_of(body.tools or (), body.tool_choice, ignore),
        parallel_calls=body.parallel_tool_calls is not False,
        template=template_variables(body.chat_template_kwargs, effort),
    )


def _format(given: TextFormat) -> Constraint | None:
    match given.type:
        case "text":
            return None
        case "json_object":
            return Constraint("json_object")
    return checked("text.format.schema", "json_schema", {} if given.schema is None else given.schema)


def _response(body: Body, given: Told, ask: Ask) -> Told:
    """A response before there is an answer. given: the body as it came."""
    format = {"type": "text"} | ((given.get("text") or {}).get("format") or {})
    return {
        "id": fresh_id(),
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


async def _told(
    answer: DeltaStream, events: ResponseEvents, kept: StoredResponses | None, items: Sequence[Told]
) -> AsyncGenerator[Told, None]:
    """The events of an answer, which is kept before the last of them tells its end."""
    for told in events.begin():
        yield told
    async for item in answer:
        for told in events.hear(item):
            yield told
    response = events.ended()
    if kept is not None:
        try:
            await asyncio.to_thread(kept.keep, Stored(response, [*items, *response["output"]]))
        except (OSError, OffspecError) as error:
            log.warning("a response could not be kept for previous_response_id: %s", error)
            response["store"] = False
    yield events.complete(response)  # numbered after the events of a client that waits meanwhile


def _event(told: Told) -> bytes:
    return event(told, told["type"])


async def _bytes(told: AsyncGenerator[Told, None]) -> AsyncGenerator[bytes, None]:
    async for each in told:
        yield _event(each)


async def _whole(told: AsyncGenerator[Told, None]) -> Told:
    """The response that the last event has."""
    response: Told = {}
    async for each in told:
        response = each.get("response", response)
    return response

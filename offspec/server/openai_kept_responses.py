"""Responses that are kept: /v1/responses/{id} and /v1/responses/{id}/input_items."""

import asyncio
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.faults import Fault
from offspec.server.parsing import convert
from offspec.server.responses import json_response, list_page
from offspec.server.stored_responses import Stored

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_INCLUDE = ("include", "include[]")  # without effect: asks for fields that items here do not have


class _Query(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


async def retrieve(request: Request) -> Response:
    """A response that is kept."""
    return json_response((await _kept_response(request)).response)


async def delete(request: Request) -> Response:
    """Keep a response no longer."""
    await _kept_response(request)
    id: str = request.path_params["id"]
    await asyncio.to_thread(request.app.state.responses.remove, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """The items that a response answers, those of earlier responses included, the latest first."""
    given = {name: value for name, value in request.query_params.items() if name not in _INCLUDE}
    query = convert(given, _Query, ignored=[], text=True)
    items = _input_items(await _kept_response(request))
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise Fault("not_found", f"there is no input item {query.after[:100]!r}", field="after")
        items = items[ids.index(query.after) + 1 :]
    return json_response(list_page(items[: query.limit], len(items) > query.limit))


async def _kept_response(request: Request) -> Stored:
    """The response that a path names. Raises Fault if it is not kept."""
    id: str = request.path_params["id"]
    found: Stored | None = await asyncio.to_thread(request.app.state.responses.get, id)
    if found is None:
        raise Fault("not_found", f"there is no response {id[:100]!r}, or it is kept no longer", field="id")
    return found


def _input_items(stored: Stored) -> list[dict[str, Any]]:
    """All items before the output of a response, each with an id, as OpenAI returns them."""
    response, ids = stored.response, set[str]()
    items = stored.items[: len(stored.items) - len(response.get("output") or ())]
    found = list[dict[str, Any]]()
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        id = item.get("id")
        if not id or id in ids:
            id = f"{_PREFIXES.get(kind, 'item')}_{response['id'].removeprefix('resp_')}{at:05}"
        ids.add(id)
        found.append({**item, "id": id, "type": kind, "status": item.get("status") or "completed"})
        if kind == "message":
            found[-1]["content"] = _parts(item)
    return found


def _parts(message: dict[str, Any]) -> Any:
    """Content of a message as parts, where it came as text."""
    content = message.get("content")
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]

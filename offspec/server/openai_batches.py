"""OpenAI's Batches: /v1/batches."""

from typing import Annotated, Literal

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.server.batch.lines import BODIES
from offspec.server.faults import invalid
from offspec.server.openai_files import ExpiresAfter, jobs_of
from offspec.server.parsing import convert
from offspec.server.reading import read_body
from offspec.server.responses import json_response

_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class Body(Struct):
    """A request for a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]  # without effect: a batch goes on for as long as it takes
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class _Query(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


async def create(request: Request) -> Response:
    """Begin a batch."""
    jobs = await jobs_of(request)
    body = await read_body(request, Body)
    if body.endpoint not in BODIES:
        raise invalid("endpoint", f"it must be {' or '.join(BODIES)}")
    seconds = body.output_expires_after.seconds if body.output_expires_after else None
    batch = await jobs.create(body.input_file_id, body.endpoint, body.metadata, seconds)
    return json_response(batch.shown())


async def listing(request: Request) -> Response:
    """The batches that are known, the newest first."""
    jobs = await jobs_of(request)
    query = convert(dict(request.query_params), _Query, ignored=[], text=True)
    page = jobs.batches.page(lambda batch: batch.shown(), after=query.after, limit=query.limit)
    return json_response(page)


async def retrieve(request: Request) -> Response:
    """How far a batch is."""
    jobs = await jobs_of(request)
    return json_response(jobs.batches.get(request.path_params["id"]).shown())


async def cancel(request: Request) -> Response:
    """Break a batch off; what is answered of it stays."""
    jobs = await jobs_of(request)
    return json_response((await jobs.cancel(request.path_params["id"])).shown())

"""OpenAI's Files and Batch APIs: /v1/files and /v1/batches."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from offspec.server.api_errors import ApiError, invalid, unsupported
from offspec.server.batch.jobs import BatchJobs
from offspec.server.batch.lines import ENDPOINTS
from offspec.server.endpoint import read_request
from offspec.server.parsing import convert
from offspec.server.reply import json_response
from offspec.server.threads import run_in_thread

_FORM = {"max_files": 1, "max_fields": 3, "max_part_size": 1024}
_Key = Annotated[str, Meta(max_length=64)]
_Value = Annotated[str, Meta(max_length=512)]


class ExpiresAfter(Struct):
    """Lifetime of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=30 * 86400)]


class _FilesQuery(Struct):
    purpose: str | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


async def jobs_of(request: Request) -> BatchJobs:
    """Return the server's files and batches. Raises ApiError if they are unavailable."""
    jobs: BatchJobs = request.app.state.batches
    await jobs.open()
    await jobs.expire()
    return jobs


async def create_file(request: Request) -> Response:
    """Store a file with the lines of a batch."""
    jobs = await jobs_of(request)
    try:
        async with request.form(**_FORM) as form:
            fields: dict[str, Any] = dict(form)
            file = fields.pop("file", None)
            if not isinstance(file, UploadFile):
                raise invalid("file", "it is missing")
            seconds = _seconds(fields)
            stored = await run_in_thread(jobs.files.add, file.file, file.filename or "file", seconds)
    except HTTPException as error:
        raise ApiError("invalid_request", f"the form cannot be read: {error.detail}") from None
    return json_response(stored.to_openai())


def _seconds(fields: dict[str, Any]) -> int | None:
    """Return the lifetime of a file from the fields of its form, in seconds; None for the default.

    Raises ApiError if a field is invalid.
    """
    if (purpose := fields.pop("purpose", None)) != "batch":
        raise invalid("purpose", "it is missing" if purpose is None else "it must be batch")
    expires = {name: fields.pop(f"expires_after[{name}]", None) for name in ("anchor", "seconds")}
    if fields:
        raise unsupported(next(iter(fields)))
    if expires == {"anchor": None, "seconds": None}:
        return None
    try:
        return convert(expires, ExpiresAfter, ignored=[], text=True).seconds
    except ApiError as error:
        message = f"expires_after.{error.message}"
        raise ApiError("invalid_request", message, field="expires_after") from None


async def list_files(request: Request) -> Response:
    """List the stored files."""
    jobs = await jobs_of(request)
    query = convert(dict(request.query_params), _FilesQuery, ignored=[], text=True)
    page = jobs.files.records.page(
        after=query.after,
        limit=query.limit,
        ascending=query.order == "asc",
        wanted=lambda file: query.purpose in (None, file.purpose),
    )
    return json_response(page)


async def retrieve_file(request: Request) -> Response:
    """Return the description of a file."""
    jobs = await jobs_of(request)
    return json_response(jobs.files.records.get(request.path_params["id"]).to_openai())


async def content(request: Request) -> Response:
    """Return the content of a file."""
    jobs = await jobs_of(request)
    file = jobs.files.records.get(request.path_params["id"])
    headers = {"x-content-type-options": "nosniff"}
    return FileResponse(
        jobs.files.path(file.id),
        headers=headers,
        media_type="application/octet-stream",
        filename=file.filename,
    )


async def delete_file(request: Request) -> Response:
    """Remove a file."""
    id = request.path_params["id"]
    await (await jobs_of(request)).remove_file(id)
    return json_response({"id": id, "object": "file", "deleted": True})


class Body(Struct):
    """Body of a request that creates a batch."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"]  # ignored: batches have no time limit
    metadata: Annotated[dict[_Key, _Value], Meta(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class _BatchesQuery(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None


async def create(request: Request) -> Response:
    """Start a batch."""
    jobs = await jobs_of(request)
    body = (await read_request(request, Body)).body
    if body.endpoint not in ENDPOINTS:
        raise invalid("endpoint", f"it must be {' or '.join(ENDPOINTS)}")
    seconds = body.output_expires_after.seconds if body.output_expires_after else None
    batch = await jobs.create(body.input_file_id, body.endpoint, body.metadata, seconds)
    return json_response(batch.to_openai())


async def listing(request: Request) -> Response:
    """List the batches, newest first."""
    jobs = await jobs_of(request)
    query = convert(dict(request.query_params), _BatchesQuery, ignored=[], text=True)
    page = jobs.batches.page(after=query.after, limit=query.limit)
    return json_response(page)


async def retrieve(request: Request) -> Response:
    """Return the description of a batch."""
    jobs = await jobs_of(request)
    return json_response(jobs.batches.get(request.path_params["id"]).to_openai())


async def cancel(request: Request) -> Response:
    """Cancel a batch. Its finished answers are kept."""
    jobs = await jobs_of(request)
    return json_response((await jobs.cancel(request.path_params["id"])).to_openai())

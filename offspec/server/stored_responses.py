"""Stored responses of the Responses API: files on disk, and the endpoints /v1/responses/{id}."""

import asyncio
import math
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from offspec.core.files import make_private_folder, write_atomic
from offspec.server.api_errors import ApiError
from offspec.server.parsing import convert
from offspec.server.reply import json_response, list_page

_ID = re.compile(r"resp_[0-9a-f]{32}")
_PRIVATE = 0o600
_RESCAN_S = 600.0  # interval after which files of other servers are counted again
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_INCLUDE = ("include", "include[]")  # ignored: requests fields that these items do not have


def new_id() -> str:
    """Return a new, unguessable response id."""
    return f"resp_{secrets.token_hex(16)}"


class _File(NamedTuple):
    """Time of the last write, in seconds since 1970, and size of a file in bytes."""

    written: float
    size: int


class StoredResponse(msgspec.Struct):
    """Response object, and all items up to its end: earlier responses, input and output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class StoredResponses:
    """Store of responses, with one file each. Methods may be called from any thread.

    Args:
        folder: Folder of the files, created with the first response and readable only by this user.
        seconds: Lifetime of a response, in seconds.
        most_bytes: Maximum total size of all files; the oldest are removed first.
    """

    def __init__(self, folder: Path, *, seconds: float = 7 * 86400, most_bytes: int = 2**28) -> None:
        self._folder, self._seconds, self._most = folder, seconds, most_bytes
        self._lock = threading.Lock()
        self._files = dict[Path, _File]()  # the oldest first
        self._bytes = 0  # total size
        self._scanned = -math.inf

    def keep(self, stored: StoredResponse) -> None:
        """Write a response and remove expired and excess ones. Raises OSError, OffspecError."""
        data = msgspec.json.encode(stored)
        path = self._folder / f"{stored.response['id']}.json"
        with self._lock:
            make_private_folder(self._folder)
            if time.monotonic() - self._scanned > _RESCAN_S:
                self._scan()
            self._make_room(len(data))
            if len(data) <= self._most:
                write_atomic(path, data, _PRIVATE)
                self._add(path, _File(time.time(), len(data)))

    def get(self, id: str) -> StoredResponse | None:
        """Return a response, or None if it is not stored or has expired."""
        path = self._path(id)
        try:
            if path is None or self._is_old(path.stat().st_mtime):
                return None
            return msgspec.json.decode(path.read_bytes(), type=StoredResponse)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # removed meanwhile, or damaged
            return None

    def remove(self, id: str) -> bool:
        """Remove a response. Return whether it was stored."""
        existed = self.get(id) is not None
        if path := self._path(id):
            with self._lock:
                self._remove(path)
        return existed

    def _path(self, id: str) -> Path | None:
        return self._folder / f"{id}.json" if _ID.fullmatch(id) else None

    def _is_old(self, written: float) -> bool:
        return time.time() - written > self._seconds

    def _scan(self) -> None:
        """Read sizes and ages of all files, because other servers of this user write to the same folder."""
        files = dict[Path, _File]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("resp_") and entry.name.endswith(".json"):
                    with suppress(OSError):  # another server removed the file
                        stat = entry.stat()
                        files[self._folder / entry.name] = _File(stat.st_mtime, stat.st_size)
        self._files, self._bytes = {}, 0
        for path, file in sorted(files.items(), key=lambda item: item[1].written):
            self._add(path, file)
        self._scanned = time.monotonic()

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until none has expired and `size` more bytes fit."""
        while self._files:
            path = next(iter(self._files))
            if self._bytes + size <= self._most and not self._is_old(self._files[path].written):
                break
            self._remove(path)

    def _add(self, path: Path, file: _File) -> None:
        self._files[path] = file
        self._bytes += file.size

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if (file := self._files.pop(path, None)) is not None:
            self._bytes -= file.size


class _Query(Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


async def retrieve(request: Request) -> Response:
    """Return a stored response. Raises ApiError if it is not stored."""
    return json_response((await _stored_response(request)).response)


async def delete(request: Request) -> Response:
    """Delete a stored response. Raises ApiError if it is not stored."""
    await _stored_response(request)
    id: str = request.path_params["id"]
    await asyncio.to_thread(request.app.state.service.responses.remove, id)
    return json_response({"id": id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """List the items before a response's output, including those of earlier responses."""
    params = {name: value for name, value in request.query_params.items() if name not in _INCLUDE}
    query = convert(params, _Query, ignored=[], text=True)
    items = _input_items(await _stored_response(request))
    if query.order == "desc":
        items.reverse()
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise ApiError("not_found", f"there is no input item {query.after[:100]!r}", field="after")
        items = items[ids.index(query.after) + 1 :]
    return json_response(list_page(items[: query.limit], len(items) > query.limit))


async def _stored_response(request: Request) -> StoredResponse:
    """Return the response with the id in the path. Raises ApiError if it is not stored."""
    id: str = request.path_params["id"]
    stored: StoredResponse | None = await asyncio.to_thread(request.app.state.service.responses.get, id)
    if stored is None:
        message = f"there is no stored response {id[:100]!r}; it may have expired"
        raise ApiError("not_found", message, field="id")
    return stored


def _input_items(stored: StoredResponse) -> list[dict[str, Any]]:
    """Return all items before the output of a response, each with an id, in OpenAI's format."""
    response, ids = stored.response, set[str]()
    items = stored.items[: len(stored.items) - len(response.get("output") or ())]
    listed = list[dict[str, Any]]()
    for at, item in enumerate(items):
        kind = item.get("type") or "message"
        id = item.get("id")
        if not id or id in ids:
            id = f"{_PREFIXES.get(kind, 'item')}_{response['id'].removeprefix('resp_')}{at:05}"
        ids.add(id)
        listed.append({**item, "id": id, "type": kind, "status": item.get("status") or "completed"})
        if kind == "message":
            listed[-1]["content"] = _parts(item)
    return listed


def _parts(message: dict[str, Any]) -> Any:
    """Return the content of a message as a list of parts, even if it was sent as text."""
    content = message.get("content")
    if not isinstance(content, str):
        return content
    if message.get("role") == "assistant":
        return [{"type": "output_text", "text": content, "annotations": []}]
    return [{"type": "input_text", "text": content}]

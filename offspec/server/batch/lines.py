"""Batch requests as JSON lines, in OpenAI's batch format or a plain format.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
    {"id": "b", "prompt": "Why is the sky blue?", "temperature": 0.7}
    {"id": "c", "messages": [{"role": "user", "content": "Why?"}], "sampling_params": {"seed": 3}}

A plain line has `messages` or a `prompt` (one user message), and any fields of a Chat Completions body.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from offspec.core.config import SamplingParams
from offspec.core.errors import RequestError
from offspec.core.files import as_read_error
from offspec.server import openai_chat, openai_completions, openai_responses
from offspec.server.api_errors import ApiError, invalid
from offspec.server.endpoint import Endpoint
from offspec.server.parsing import convert, parse

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ENDPOINTS: dict[str, Endpoint[Any]] = {
    CHAT: Endpoint(openai_chat.Body, openai_chat.create),
    COMPLETIONS: Endpoint(openai_completions.Body, openai_completions.create),
    RESPONSES: Endpoint(openai_responses.Body, openai_responses.create),
}
_TO_REQUESTS: dict[str, Callable[[Any, SamplingParams], object]] = {
    CHAT: partial(openai_chat.to_request, ignore=lambda part: None),
    COMPLETIONS: openai_completions.to_requests,
    RESPONSES: partial(openai_responses.to_request, ignore=lambda part: None),
}
_LINE = "the line"  # in errors, which are reported with the number of the line
_LONGEST = 32 * 2**20  # maximum bytes of a line

_Name = Annotated[str, Meta(min_length=1, max_length=512)]


class _Wrapped(Struct):
    """Line in OpenAI's format."""

    custom_id: _Name
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """Request in a line of the file.

    Args:
        number: Number of the line, from 1.
        id: Id set by the user. Default: "line-" and the number.
        url: Path of the API for the request; "" if the line cannot be read.
        body: Body of the request, complete except for the model, which may be missing.
        plain: Whether the line is in the plain format; its result is in the same format.
        fault: Reason why the line is invalid; None if it passes all checks that need no model.
    """

    number: int
    id: str
    url: str
    body: dict[str, Any]
    plain: bool
    fault: ApiError | None = None

    def request(self, model: str) -> dict[str, Any]:
        """Return the body to send.

        If it has no seed, one is derived from the id and the body, so that each run has the same seed.
        Responses are not stored for `previous_response_id`, because a batch would displace those of clients.

        model: name of the model if the line does not name one.
        """
        body = {"model": model, **self.body}
        if body.get("seed") is None:
            text = json.dumps([self.id, self.body], sort_keys=True)
            body["seed"] = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:7], "big")
        if self.url == RESPONSES:
            body["store"] = False
        return body


def read_lines(path: Path, name: str = "", defaults: SamplingParams | None = None) -> Iterator[Line]:
    """Yield the requests of a file in order, skipping empty lines.

    name: name of the file in error messages. Default: its path. defaults: see `read_line`.

    Raises:
        CheckpointError: The file cannot be read.
        RequestError: Two lines have the same id.
    """
    seen = dict[str, int]()
    with as_read_error(name or path), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            line = read_line(number, text.strip(), defaults)
            if line.id in seen:
                raise RequestError(
                    f"lines {seen[line.id]} and {number} of {name or path} have the same id, {line.id!r}: "
                    "give each its own"
                )
            seen[line.id] = number
            yield line


def read_line(number: int, text: bytes, defaults: SamplingParams | None = None) -> Line:
    """Parse one line. An invalid line has its error in the field `fault`.

    Args:
        number: Number of the line.
        text: The line.
        defaults: Sampling parameters of lines that set none. If given, the line is also checked for the
            errors of a run that can be found without the model.
    """
    name, plain, url, body = f"line-{number}", True, "", dict[str, Any]()
    try:
        if len(text) > _LONGEST:
            raise ApiError("too_large", f"the line is longer than {_LONGEST} bytes")
        fields = convert(parse(text, name=_LINE), dict[str, Any], name=_LINE)
        plain = "body" not in fields and "url" not in fields
        id = fields.get("id" if plain and "id" in fields else "custom_id")
        name = name if id is None else str(id)
        url, body = (CHAT, _plain_body(fields)) if plain else _wrapped_body(fields)
        # A plain line is written for offspec, so an unknown field is an error.
        ignored = None if plain else list[str]()
        converted = convert(body, ENDPOINTS[url].body, ignored=ignored, name=_LINE if plain else "body")
        if converted.stream:
            raise invalid("stream", "batches do not stream answers; omit it")
        if defaults is not None:
            _TO_REQUESTS[url](converted, defaults)
        return Line(number, name, url, body, plain)
    except ApiError as error:
        return Line(number, name, url, body, plain, error)


def _wrapped_body(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wrapped = convert(fields, _Wrapped, ignored=[], name=_LINE)
    if wrapped.url not in ENDPOINTS:
        raise invalid("url", f"it must be {' or '.join(ENDPOINTS)}, not {wrapped.url[:100]!r}")
    return wrapped.url, wrapped.body


def _plain_body(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the Chat Completions body of a plain line. Raises ApiError if the line is invalid."""
    body = {name: value for name, value in fields.items() if name not in ("id", "custom_id")}
    params = body.pop("sampling_params", None) or {}
    if not isinstance(params, dict):
        raise invalid("sampling_params", "it must be an object")
    prompt = body.pop("prompt", None)
    if (prompt is None) == (body.get("messages") is None):
        raise ApiError("invalid_request", "a line must have either a prompt or messages", field="prompt")
    if prompt is not None:
        if not isinstance(prompt, str):
            raise invalid("prompt", "it must be a string")
        body["messages"] = [{"role": "user", "content": prompt}]
    return {**params, **body}

"""Requests in lines of JSON: OpenAI's batch format, and a plain one.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}
    {"id": "b", "prompt": "Why is the sky blue?", "temperature": 0.7}
    {"id": "c", "messages": [{"role": "user", "content": "Why?"}], "sampling_params": {"seed": 3}}

A plain line has a prompt (one user message) and any fields of a Chat Completions body.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
_LONGEST = 32 * 2**20  # bytes of a line

_Name = Annotated[str, Meta(min_length=1, max_length=512)]


class _Wrapped(Struct):
    """A line of OpenAI's format."""

    custom_id: _Name
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A request of the file.

    Args:
        number: Of the line, from 1.
        id: The user's name for it, by default "line-" and its number.
        url: Path of the API that answers it; "": the line cannot be read.
        body: What is asked for; whole, but that it may lack a model.
        plain: It came in the plain format, and its result goes out in that.
        fault: Reason why the line is invalid; None if it passes all checks that need no model.
    """

    number: int
    id: str
    url: str
    body: dict[str, Any]
    plain: bool
    fault: ApiError | None = None

    def request(self, model: str) -> dict[str, Any]:
        """The body that is asked for.

        A seed that it lacks comes from its id and itself: another run has the same. Responses are
        not kept for `previous_response_id`: a batch would displace those of clients.

        model: the name of the model, where the line gives none.
        """
        body = {"model": model, **self.body}
        if body.get("seed") is None:
            text = json.dumps([self.id, self.body], sort_keys=True)
            body["seed"] = int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:7], "big")
        if self.url == RESPONSES:
            body["store"] = False
        return body


def read_lines(path: Path, name: str = "") -> Iterator[Line]:
    """The requests of a file, in order; empty lines are left out.

    name: what errors call the file, by default its path.

    Raises:
        CheckpointError: The file cannot be read.
        RequestError: Two lines have the same id.
    """
    seen = dict[str, int]()
    with as_read_error(name or path), path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if not text.strip():
                continue
            line = read_line(number, text.strip())
            if line.id in seen:
                raise RequestError(
                    f"lines {seen[line.id]} and {number} of {name or path} have the same id, {line.id!r}: "
                    "give each its own"
                )
            seen[line.id] = number
            yield line


def read_line(number: int, text: bytes) -> Line:
    """One line, with its fault where it has one."""
    name, plain, url, body = f"line-{number}", True, "", dict[str, Any]()
    try:
        if len(text) > _LONGEST:
            raise ApiError("too_large", f"the line is longer than {_LONGEST} bytes")
        fields = convert(parse(text, name=_LINE), dict[str, Any], name=_LINE)
        plain = "body" not in fields and "url" not in fields
        name = str(fields.get("id" if plain and "id" in fields else "custom_id", name))
        url, body = (CHAT, _plain_body(fields)) if plain else _wrapped_body(fields)
        # A plain line is written for offspec: a field that it does not know is a mistake.
        ignored = None if plain else list[str]()
        asked = convert(body, ENDPOINTS[url].body, ignored=ignored, name=_LINE if plain else "body")
        if asked.stream:
            raise invalid("stream", "the answers of a batch come whole; leave it out")
        return Line(number, name, url, body, plain)
    except ApiError as fault:
        return Line(number, name, url, body, plain, fault)


def check_line(line: Line, defaults: SamplingParams) -> Line:
    """A line with the fault that a run would find in its fields, as far as no model is needed.

    defaults: sampling parameters of lines that set none.
    """
    if line.fault is not None:
        return line
    body: Any = convert(line.body, ENDPOINTS[line.url].body, ignored=[])
    try:
        _TO_REQUESTS[line.url](body, defaults)
    except ApiError as fault:
        return replace(line, fault=fault)
    return line


def _wrapped_body(fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    wrapped = convert(fields, _Wrapped, ignored=[], name=_LINE)
    if wrapped.url not in ENDPOINTS:
        raise invalid("url", f"it must be {' or '.join(ENDPOINTS)}, not {wrapped.url[:100]!r}")
    return wrapped.url, wrapped.body


def _plain_body(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of Chat Completions that a plain line stands for. Raises Fault."""
    body = {name: value for name, value in fields.items() if name not in ("id", "custom_id")}
    params = body.pop("sampling_params", None) or {}
    if not isinstance(params, dict):
        raise invalid("sampling_params", "it must be an object")
    prompt = body.pop("prompt", None)
    if (prompt is None) == (body.get("messages") is None):
        raise ApiError("invalid_request", "a line must have either a prompt or messages", field="prompt")
    if prompt is not None:
        body["messages"] = [{"role": "user", "content": prompt}]
    return {**params, **body}

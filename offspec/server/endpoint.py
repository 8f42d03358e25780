"""Endpoints of the APIs: the struct of their bodies, and the handler for requests over HTTP or in a batch."""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from offspec.server.api_errors import unsupported
from offspec.server.parsing import convert, field_name, parse
from offspec.server.service import Service

log = logging.getLogger("offspec.server")

_IGNORED = "offspec.ignored"  # key in the ASGI scope: names of the request's ignored fields
_MOST_LOGGED = 1000  # maximum number of logged names, which limits the memory that clients can use
_MOST_SHOWN = 20  # maximum number of names in a response header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-() ]")
_T = TypeVar("_T")


class _NamesModel(Protocol):
    model: str


_M = TypeVar("_M", bound=_NamesModel)


class ApiRequest(Generic[_T]):
    """Request to an API.

    body: the body as a struct. ignored: names of ignored fields.

    Args:
        service: Service that answers the request.
        path: Path of the endpoint.
        raw_body: Parsed JSON of the body.
        body_type: Struct of the body.
        strict: Whether to refuse fields that have no effect.

    Raises:
        ApiError: The body is invalid.
    """

    def __init__(
        self, service: Service, path: str, raw_body: Any, body_type: type[_T], strict: bool = False
    ) -> None:
        self.service, self.raw_body = service, raw_body
        self.ignored = list[str]()
        self._path, self._strict = path, strict
        unknown = list[str]()
        self.body = convert(raw_body, body_type, ignored=None if strict else unknown)
        self.ignore(*unknown)

    def ignore(self, *parts: str) -> None:
        """Report ignored fields, such as "messages[0].mood", to the client and once in the log.

        Raises ApiError if the request is strict.
        """
        logged = self.service.ignored_names
        for part in parts:
            if self._strict:
                raise unsupported(part)
            name = _UNSAFE.sub("?", field_name(part))[:80].strip() or "?"
            if name not in self.ignored:
                self.ignored.append(name)
            if name not in logged and len(logged) < _MOST_LOGGED:
                logged.add(name)
                log.info("ignored a field that has no effect: %s (%s)", name, self._path)


async def read_request(http_request: Request, body_type: type[_T]) -> ApiRequest[_T]:
    """Read the API request in an HTTP request. Raises ApiError if its body is invalid."""
    service: Service = http_request.app.state.service
    raw_body, strict = parse(await http_request.body()), service.settings.strict
    request = ApiRequest(service, http_request.url.path, raw_body, body_type, strict)
    http_request.scope[_IGNORED] = request.ignored
    return request


def ignored_header(scope: Scope) -> str:
    """Return the names of a request's ignored fields, for a header of the response."""
    names: list[str] = scope.get(_IGNORED, [])
    more = ["..."] if len(names) > _MOST_SHOWN else []
    return ", ".join([*names[:_MOST_SHOWN], *more])


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[_M]):
    """Endpoint for requests that name a model.

    Args:
        body: Struct of the request body.
        create: Handler that returns the response. Raises ApiError.
    """

    body: type[_M]
    create: Callable[[ApiRequest[_M]], Awaitable[Response]]

    async def respond(self, request: Request) -> Response:
        """Answer an HTTP request. Raises ApiError if it is invalid."""
        return await self.answer(await read_request(request, self.body))

    async def answer(self, request: ApiRequest[_M]) -> Response:
        """Answer an API request. Raises ApiError if it is invalid."""
        request.body.model = request.service.check_name(request.body.model)
        return await self.create(request)

"""Endpoints of APIs: the struct of their bodies, and what answers one, over HTTP or in a batch."""

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

_IGNORED = "offspec.ignored"  # in the scope of a request: names of what has no effect in it
_MOST_LOGGED = 1000  # names, so that no client can fill the memory with them
_MOST_SHOWN = 20  # names in a response header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-() ]")
_T = TypeVar("_T")


class _NamesModel(Protocol):
    model: str


_M = TypeVar("_M", bound=_NamesModel)


class ApiRequest(Generic[_T]):
    """A request to an API.

    body: as a struct. ignored: names of parts that have no effect.

    Args:
        service: Answers it.
        path: Path of the endpoint.
        given: Its body as it came.
        wanted: Struct of the body.
        strict: Refuse parts without effect.

    Raises:
        ApiError: A wrong body.
    """

    def __init__(
        self, service: Service, path: str, given: Any, wanted: type[_T], strict: bool = False
    ) -> None:
        self.service, self.given = service, given
        self.ignored = list[str]()
        self._path, self._strict = path, strict
        unknown = list[str]()
        self.body = convert(given, wanted, ignored=None if strict else unknown)
        self.ignore(*unknown)

    def ignore(self, *parts: str) -> None:
        """Report parts without effect, such as "messages[0].mood": for the log, once, and for the client."""
        seen = self.service.ignored_names
        for part in parts:
            if self._strict:
                raise unsupported(part)
            name = _UNSAFE.sub("?", field_name(part))[:80].strip() or "?"
            if name not in self.ignored:
                self.ignored.append(name)
            if name not in seen and len(seen) < _MOST_LOGGED:
                seen.add(name)
                log.info("ignored a field that has no effect: %s (%s)", name, self._path)


async def read_request(request: Request, wanted: type[_T]) -> ApiRequest[_T]:
    """The request with the body of an HTTP request. Raises ApiError."""
    service: Service = request.app.state.service
    given, strict = parse(await request.body()), service.settings.strict
    found = ApiRequest(service, request.url.path, given, wanted, strict)
    request.scope[_IGNORED] = found.ignored
    return found


def ignored_header(scope: Scope) -> str:
    """Return the names of what had no effect in a request, for the header of its response."""
    names: list[str] = scope.get(_IGNORED, [])
    more = ["..."] if len(names) > _MOST_SHOWN else []
    return ", ".join([*names[:_MOST_SHOWN], *more])


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[_M]):
    """An endpoint for requests that name a model.

    Args:
        body: Struct of its bodies.
        create: Makes the response. Raises ApiError.
    """

    body: type[_M]
    create: Callable[[ApiRequest[_M]], Awaitable[Response]]

    async def respond(self, request: Request) -> Response:
        """Answer an HTTP request. Raises ApiError."""
        return await self.answer(await read_request(request, self.body))

    async def answer(self, request: ApiRequest[_M]) -> Response:
        """Answer a request. Raises ApiError."""
        request.body.model = request.service.check_name(request.body.model)
        return await self.create(request)

"""Endpoints of APIs: the struct of their bodies, and what answers one, over HTTP or in a batch."""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from offspec.server.faults import unsupported
from offspec.server.parsing import convert, field_name, parse
from offspec.server.service import Service

log = logging.getLogger("offspec.server")

_IGNORED = "offspec.ignored"  # in the scope of a request: what takes the parts without effect
_MOST_LOGGED = 1000  # names, so that no client can fill the memory with them
_MOST_SHOWN = 20  # names in a response header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-() ]")
_T = TypeVar("_T")


class _NamesModel(Protocol):
    model: str


_M = TypeVar("_M", bound=_NamesModel)


class Ignored:
    """Takes parts of a request without effect: for the log, once for each name, and for the client.

    Args:
        service: Knows the names that were logged.
        path: Path of the request.
        strict: Refuse such parts.
    """

    def __init__(self, service: Service, path: str, strict: bool = False) -> None:
        self._seen, self._path, self.strict = service.ignored_names, path, strict
        self.names = list[str]()

    def __call__(self, *parts: str) -> None:
        """Report parts, such as "messages[0].mood". Raises Fault if they are refused."""
        for part in parts:
            if self.strict:
                raise unsupported(part)
            name = _UNSAFE.sub("?", field_name(part))[:80].strip() or "?"
            if name not in self.names:
                self.names.append(name)
            if name not in self._seen and len(self._seen) < _MOST_LOGGED:
                self._seen.add(name)
                log.info("ignored, without effect here: %s (%s)", name, self._path)


@dataclass(frozen=True, slots=True)
class ApiRequest(Generic[_T]):
    """A request to an API.

    Args:
        service: Answers it.
        given: Its body as it came.
        body: The same as a struct of the API.
        ignore: Takes parts without effect.
    """

    service: Service
    given: Any
    body: _T
    ignore: Ignored


def read_given(service: Service, given: Any, wanted: type[_T], ignore: Ignored) -> ApiRequest[_T]:
    """The request with a body that was parsed. Raises Fault, if strict also for an unknown field."""
    unknown = list[str]()
    body = convert(given, wanted, ignored=None if ignore.strict else unknown)
    ignore(*unknown)
    return ApiRequest(service, given, body, ignore)


async def read_request(request: Request, wanted: type[_T]) -> ApiRequest[_T]:
    """The request with the body of an HTTP request. Raises Fault."""
    service: Service = request.app.state.service
    ignore = request.scope[_IGNORED] = Ignored(service, request.url.path, service.settings.strict)
    return read_given(service, parse(await request.body()), wanted, ignore)


def ignored_header(scope: Scope) -> str:
    """Return the names of what had no effect in a request, for the header of its response."""
    names = scope[_IGNORED].names if _IGNORED in scope else []
    more = ["..."] if len(names) > _MOST_SHOWN else []
    return ", ".join([*names[:_MOST_SHOWN], *more])


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[_M]):
    """An endpoint for requests that name a model.

    Args:
        body: Struct of its bodies.
        create: Makes the response. Raises Fault.
    """

    body: type[_M]
    create: Callable[[ApiRequest[_M]], Awaitable[Response]]

    async def respond(self, request: Request) -> Response:
        """Answer an HTTP request. Raises Fault."""
        return await self._named(await read_request(request, self.body))

    async def answer(self, service: Service, path: str, given: Any) -> Response:
        """Answer a body without HTTP. path: of the endpoint. Raises Fault."""
        return await self._named(read_given(service, given, self.body, Ignored(service, path)))

    async def _named(self, request: ApiRequest[_M]) -> Response:
        request.body.model = request.service.check_name(request.body.model)
        return await self.create(request)

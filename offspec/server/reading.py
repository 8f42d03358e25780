"""The body of a request, read into the struct of its API, and a report of what has no effect in it."""

import logging
import re
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.types import Scope

from offspec.server.faults import unsupported
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


async def read_request(request: Request, wanted: type[_M]) -> tuple[Service, _M]:
    """Return the service, and the body of a request with the name of a model that is served. Raises Fault."""
    service: Service = request.app.state.service
    body = await read_body(request, wanted)
    body.model = service.check_name(body.model)
    return service, body


async def read_body(request: Request, wanted: type[_T]) -> _T:
    """Read the body of a request. Raises Fault; in strict mode also for a field that is unknown."""
    ignored = list[str]()
    data = parse(await request.body())
    body = convert(data, wanted, ignored=None if request.app.state.strict else ignored)
    report_ignored(request, *ignored)
    return body


def report_ignored(request: Request, *paths: str) -> None:
    """Report parts of a request that have no effect: in the log, once for each name, and to the client.

    Raises Fault in strict mode.
    """
    seen: set[str] = request.app.state.ignored_names
    names = request.scope.setdefault(_IGNORED, [])
    for path in paths:
        if request.app.state.strict:
            raise unsupported(path)
        name = _UNSAFE.sub("?", field_name(path))[:80].strip() or "?"
        if name not in names:
            names.append(name)
        if name not in seen and len(seen) < _MOST_LOGGED:
            seen.add(name)
            log.info("ignored, without effect here: %s (%s)", name, request.url.path)


def ignored_header(scope: Scope) -> str:
    """Return the names of what had no effect in a request, for the header of its response."""
    names: list[str] = scope.get(_IGNORED, [])
    more = ["..."] if len(names) > _MOST_SHOWN else []
    return ", ".join([*names[:_MOST_SHOWN], *more])

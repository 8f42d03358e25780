"""The body of a request, read into the struct of its API, and a report of what has no effect in it."""

import logging
import re
from collections.abc import Iterable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Scope

from offspec.server.faults import unsupported
from offspec.server.parsing import convert, field_name, parse

log = logging.getLogger("offspec.server")

_IGNORED = "offspec.ignored"  # in the scope of a request: names of what has no effect in it
_MOST_LOGGED = 1000  # names, so that no client can fill the memory with them
_MOST_SHOWN = 20  # names in a response header
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-() ]")
_T = TypeVar("_T")


async def read_body(request: Request, wanted: type[_T]) -> _T:
    """Read the body of a request. Raises Fault; in strict mode also for a field that is unknown."""
    ignored = list[str]()
    data = parse(await request.body())
    body = convert(data, wanted, ignored=None if request.app.state.strict else ignored)
    report_ignored(request, ignored)
    return body


def report_ignored(request: Request, paths: Iterable[str]) -> None:
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

"""Web page at /: static files of the package, which use the same API as other clients."""

from functools import cache
from importlib.resources import files
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = files("offspec.server").joinpath("page")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".txt": "text/plain",
}
_HEADERS = {
    # Scripts in answers do not run, and nothing is loaded from other servers.
    "content-security-policy": "; ".join(
        (
            "default-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def _file(request: Request) -> Response:
    name = request.url.path.removeprefix("/page/").strip("/") or "index.html"
    return Response(_content(name), headers=_HEADERS, media_type=_TYPES[PurePath(name).suffix])


@cache
def _content(name: str) -> bytes:
    return _FOLDER.joinpath(name).read_bytes()


ROUTES = (
    Route("/", _file, methods=["GET"]),
    *(
        Route(f"/page/{file.name}", _file, methods=["GET"])
        for file in _FOLDER.iterdir()
        if PurePath(file.name).suffix in _TYPES and file.name != "index.html"
    ),
)

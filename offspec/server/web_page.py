"""The page at /: static files of the package, which use the same API as other clients."""

from functools import cache
from importlib.resources import files
from pathlib import PurePath

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_MODULES = """
page api chat clipboard conversation_list conversations dom engine_panel markdown messages server settings
speed storage tree tree_drawing
"""
_NAMES = (
    *("index.html", "page.css", "icon.svg", "markdown-it.min.mjs", "markdown-it.LICENSE.txt"),
    *(f"{name}.js" for name in _MODULES.split()),
)
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".txt": "text/plain",
}
_HEADERS = {
    # No script of an answer runs, and nothing is loaded from elsewhere.
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
    return files("offspec.server").joinpath("page", name).read_bytes()


ROUTES = (
    Route("/", _file, methods=["GET"]),
    *(Route(f"/page/{name}", _file, methods=["GET"]) for name in _NAMES if name != "index.html"),
)

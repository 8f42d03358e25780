"""The page at /: static files of the package, which use the same API as other clients."""

from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {
    "index.html": "text/html",
    "page.css": "text/css",
    "icon.svg": "image/svg+xml",
    **dict.fromkeys(
        ("page.js", "api.js", "markdown.js", "panel.js", "tree.js", "tree_drawing.js"), "text/javascript"
    ),
}
_HEADERS = {
    # Whatever an answer holds, nothing of it runs and nothing is fetched for it from elsewhere.
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
    return Response(_content(name), headers=_HEADERS, media_type=_TYPES[name])


@cache
def _content(name: str) -> bytes:
    return files("offspec.server").joinpath("page", name).read_bytes()


ROUTES = (
    Route("/", _file, methods=["GET"]),
    *(Route(f"/page/{name}", _file, methods=["GET"]) for name in _TYPES if name != "index.html"),
)

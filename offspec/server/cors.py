"""Cross-origin resource sharing (CORS): access for web pages of other servers."""

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from offspec.core.errors import RequestError

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([^\s/:?#@*\[\]]+|\[[0-9a-f:.]+\])(:\d{1,5})?")
_METHODS = ("GET", "POST", "DELETE")
_EXPOSED = ("x-request-id", "request-id", "retry-after", "x-offspec-ignored")


def checked_origin(text: str) -> str:
    """Return an origin as browsers send it, or "*" for all origins. Raises RequestError if it is invalid."""
    origin = text.strip().lower()
    if origin != ANY and not _ORIGIN.fullmatch(origin):
        raise RequestError(
            f"`cors_origin` must be scheme://host[:port], such as http://localhost:3000, or *, not {text!r}"
        )
    for scheme, port in (("http", 80), ("https", 443)):
        if origin.startswith(f"{scheme}://"):
            origin = origin.removesuffix(f":{port}")  # browsers omit default ports
    return origin


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Wrap an application to answer preflight requests and let pages of these origins read all answers.

    This middleware is the outermost, because preflight requests have no key and pages must be able to read
    errors. All headers are allowed, because browser clients send headers that vary between releases. Cookies
    are not allowed.
    """
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=_METHODS,
        allow_headers=("*",),
        expose_headers=_EXPOSED,
        allow_private_network=True,  # public pages may use a server in the local network
    )

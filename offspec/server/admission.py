"""Admission of requests (key, host, length and time limits) and the access log."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offspec.server import web_page
from offspec.server.api_errors import CLIENT_GONE, ApiError, internal
from offspec.server.connections import REFUSED
from offspec.server.cors import ANY
from offspec.server.endpoint import ignored_header
from offspec.server.settings import Settings

log = logging.getLogger("offspec.server")
access_log = logging.getLogger("offspec.server.access")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Names of this machine inside containers of Docker and Podman. Public DNS has no names below .internal.
_CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
_UPLOADS = frozenset({"/v1/files"})  # paths with multipart bodies, which are streamed to the application
_OPEN = frozenset({"/health", *(route.path for route in web_page.ROUTES)})  # paths that need no key
# Builds an error response in the format of the requested API, from path, error and request headers.
_Fail = Callable[[str, ApiError, Headers], Response]


class AdmissionMiddleware:
    """ASGI middleware around the whole application.

    Args:
        app: The wrapped application.
        fail: Builds the response of an error.
        settings: Source of the API key, origins and limits.
        local: Whether requests without a key must name this machine as their host. This refuses pages of
            other sites whose names resolve to this machine (DNS rebinding).
        on_request_end: Called with path, status and seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        fail: _Fail,
        settings: Settings,
        local: bool,
        on_request_end: Callable[[str, int, float], None],
    ) -> None:
        self._app, self._fail, self._local, self._ended = app, fail, local, on_request_end
        self._settings = settings
        self._key = None if settings.api_key is None else _digest(settings.api_key)
        self._body_bytes = 0  # total bytes of all bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        name = client_id if _ID.fullmatch(client_id) else f"req_{secrets.token_hex(12)}"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = MutableHeaders(raw=message.setdefault("headers", []))
                own["x-request-id"] = own["request-id"] = name
                if ignored := ignored_header(scope):
                    own["x-offspec-ignored"] = ignored
            await send(message)

        try:
            await self._answer(scope, headers, receive, sending)
        except Exception:
            log.exception("request %s failed", name)
            if not status:
                await self._fail(scope["path"], internal(), headers)(scope, receive, sending)
        finally:
            seconds, status = time.perf_counter() - began, status or CLIENT_GONE
            self._ended(scope["path"], status, seconds)
            client = (scope.get("client") or ("-",))[0]
            path = scope.get("raw_path", b"").decode("ascii", "replace")[:200]
            access_log.info("%s %s %s %d %.3fs %s", client, scope["method"], path, status, seconds, name)

    async def _answer(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        with self._reserve_body_bytes() as take:
            try:
                upload = scope["method"] == "POST" and scope["path"] in _UPLOADS
                self._admit(scope, headers, upload)
                limited = _limited(self._settings, headers, receive, upload, take)
                has_body = scope["method"] not in ("GET", "HEAD")
                body = await Request(scope, limited).body() if has_body and not upload else b""
            except ApiError as error:
                response = self._fail(scope["path"], error, headers)
                response.headers["connection"] = "close"  # the rest of the body is not read
                await response(scope, receive, send)
                return
            if upload:
                await self._app(scope, limited, _closing(send))
            else:
                await self._app(scope, _replayed(body, receive), send)

    @contextmanager
    def _reserve_body_bytes(self) -> Iterator[Callable[[int], None]]:
        """Yield a function that reserves bytes of a body until the block ends, or raises ApiError."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            taken += count
            self._body_bytes += count
            if self._body_bytes > self._settings.bodies_bytes:
                message = "the bodies of other requests use all memory for bodies: try again later"
                raise ApiError("rate_limit", message, retry_after=5)

        try:
            yield take
        finally:
            self._body_bytes -= taken

    def _admit(self, scope: Scope, headers: Headers, upload: bool) -> None:
        """Check that a request is allowed. Raises ApiError if it is not."""
        if REFUSED in scope.get("state", ()):
            message = "too many connections are open: close some, or try again later"
            raise ApiError("unavailable", message, code="too_many_connections", retry_after=5)
        if self._key is not None and scope["path"] not in _OPEN and not self._has_valid_key(headers):
            raise ApiError("authentication", "the API key is missing or wrong", code="invalid_api_key")
        if self._key is None and self._local and not _is_local(headers.get("host", "")):
            raise ApiError(
                "permission",
                "without an API key, the server accepts only localhost or an IP address as its host name; "
                "set OFFSPEC_API_KEY at its start to allow other names",
            )
        if scope["method"] != "POST":
            return
        # Scripts of other sites can send forms, or requests without a type, without a preflight request.
        kind = "multipart/form-data" if upload else "application/json"
        if headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
            raise ApiError("invalid_request", f"the body must be sent with content-type: {kind}")
        if upload and not self._is_allowed_page(headers):
            raise ApiError(
                "permission",
                "files from pages of other sites are refused: allow their origin with `cors_origin`",
            )
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise ApiError("invalid_request", "the body must be sent without content-encoding")

    def _is_allowed_page(self, headers: Headers) -> bool:
        """Return whether a request comes from the server's own page, an allowed origin, or no page."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.origins or ANY in self._settings.origins:
            return True
        return urlsplit(origin).netloc == headers.get("host")

    def _has_valid_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self._key is not None and hmac.compare_digest(_digest(token), self._key)


def _digest(text: str) -> bytes:
    """Return a digest of fixed length, so that comparing it does not reveal the length of the text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _is_local(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":\d+$", host) else host
    name = name.strip("[]").lower()
    if name == "localhost" or name.endswith(".localhost") or name in _CONTAINER_HOSTS:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _limited(
    settings: Settings, headers: Headers, receive: Receive, upload: bool, take: Callable[[int], None]
) -> Receive:
    """Return a `receive` that raises ApiError if the body is too long or too slow.

    Args:
        settings: Limits on size and time.
        headers: Headers of the request.
        receive: ASGI function that receives the body.
        upload: Whether the body is a form with a file.
        take: Called with the number of bytes received, unless the body is an upload.
    """
    size, complete = 0, False
    limit = settings.upload_bytes if upload else settings.body_bytes
    seconds = settings.upload_seconds if upload else settings.body_seconds
    deadline = asyncio.get_running_loop().time() + seconds
    too_large = ApiError("too_large", f"the body is larger than {limit} bytes")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_large

    async def give() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise ApiError("timeout", "the body did not arrive in time") from None
        if message["type"] == "http.disconnect":
            raise ApiError("invalid_request", "the client disconnected before sending its whole body")
        size += len(message.get("body", b""))
        if size > limit:
            raise too_large
        if not upload:
            take(len(message.get("body", b"")))
        complete = not message.get("more_body", False)
        return message

    return give


def _closing(send: Send) -> Send:
    """Return a `send` that closes the connection after an error, when the rest of the body is not read."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            MutableHeaders(raw=message.setdefault("headers", []))["connection"] = "close"
        await send(message)

    return sending


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that replays the body, then forwards further messages."""
    replayed = False

    async def again() -> Message:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again

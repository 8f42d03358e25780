"""Admission of requests: key, host, length and time limits; and the line that each has in the log."""

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
from offspec.server.connections import REFUSED
from offspec.server.cors import ANY
from offspec.server.endpoint import ignored_header
from offspec.server.faults import CLIENT_GONE, Fault, internal
from offspec.server.settings import Settings

log = logging.getLogger("offspec.server")
access_log = logging.getLogger("offspec.server.access")

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
# Names of this machine inside containers of Docker and Podman. Public DNS has no names below .internal.
_CONTAINER_HOSTS = frozenset({"host.docker.internal", "host.containers.internal"})
_UPLOADS = frozenset({"/v1/files"})  # paths whose bodies are forms with a file, passed on as they come
_OPEN = frozenset({"/health", *(route.path for route in web_page.ROUTES)})  # paths that need no key
_Fail = Callable[[str, Fault, Headers], Response]  # a fault in the shape of the API that is asked


class Guard:
    """ASGI middleware around the whole application.

    Args:
        app: What answers.
        fail: Writes a fault.
        settings: Its `key`, `origins` and limits hold for all requests.
        local: Only names of this machine are taken for the host in a request without a key: a page of another
            site that has its name resolve to this machine is refused.
        ended: Told path, status and seconds of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        fail: _Fail,
        settings: Settings,
        local: bool,
        ended: Callable[[str, int, float], None],
    ) -> None:
        self._app, self._fail, self._local, self._ended = app, fail, local, ended
        self._settings = settings
        self._key = None if settings.key is None else _digest(settings.key)
        self._taken = 0  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.perf_counter(), 0
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"

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
        with self._room() as take:
            try:
                upload = scope["method"] == "POST" and scope["path"] in _UPLOADS
                self._admit(scope, headers, upload)
                coming = _limited(self._settings, headers, receive, upload, take)
                has_body = scope["method"] not in ("GET", "HEAD")
                body = await Request(scope, coming).body() if has_body and not upload else b""
            except Fault as fault:
                response = self._fail(scope["path"], fault, headers)
                response.headers["connection"] = "close"  # what is left of the body is not read
                await response(scope, receive, send)
                return
            if upload:
                await self._app(scope, coming, _closing(send))
            else:
                await self._app(scope, _replayed(body, receive), send)

    @contextmanager
    def _room(self) -> Iterator[Callable[[int], None]]:
        """A function that reserves bytes of a body until the block ends. It raises Fault if none are left."""
        taken = 0

        def take(count: int) -> None:
            nonlocal taken
            taken += count
            self._taken += count
            if self._taken > self._settings.bodies_bytes:
                message = "the bodies of other requests leave no room for this one: try again later"
                raise Fault("rate_limit", message, retry_after=5)

        try:
            yield take
        finally:
            self._taken -= taken

    def _admit(self, scope: Scope, headers: Headers, upload: bool) -> None:
        """Raises Fault for those who may not ask."""
        if REFUSED in scope.get("state", ()):
            message = "too many connections are open: close some, or try again later"
            raise Fault("unavailable", message, code="too_many_connections", retry_after=5)
        if self._key is not None and scope["path"] not in _OPEN and not self._knows_key(headers):
            raise Fault("authentication", "the API key is missing or wrong", code="invalid_api_key")
        if self._key is None and self._local and not _is_local(headers.get("host", "")):
            raise Fault(
                "permission",
                "without an API key this server answers only to localhost and addresses of this machine; "
                "start it with an API key to give it other names",
            )
        if scope["method"] != "POST":
            return
        # Other pages' scripts can send bodies of other kinds unasked, forms among them, and those of none.
        kind = "multipart/form-data" if upload else "application/json"
        if headers.get("content-type", "").partition(";")[0].strip().lower() != kind:
            raise Fault("invalid_request", f"the body must be sent with content-type: {kind}")
        if upload and not self._is_allowed_page(headers):
            raise Fault("permission", "files are not taken from pages of other sites")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Fault("invalid_request", "the body must be sent without content-encoding")

    def _is_allowed_page(self, headers: Headers) -> bool:
        """Whether a request comes from the server's own page, an allowed origin, or no page at all."""
        origin = headers.get("origin")
        if origin is None or origin in self._settings.origins or ANY in self._settings.origins:
            return True
        return urlsplit(origin).netloc == headers.get("host")

    def _knows_key(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        token = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return self._key is not None and hmac.compare_digest(_digest(token), self._key)


def _digest(text: str) -> bytes:
    """A digest has one length, so that comparing it reveals nothing of the text's."""
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
    """A body as it comes. Receiving raises Fault if it is too long or too slow.

    upload: it is a form with a file. take: told of the bytes of other bodies.
    """
    size, whole = 0, False
    most = settings.upload_bytes if upload else settings.body_bytes
    seconds = settings.upload_seconds if upload else settings.body_seconds
    deadline = asyncio.get_running_loop().time() + seconds
    too_large = Fault("too_large", f"the body is larger than {most} bytes")
    length = headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > most:
        raise too_large

    async def give() -> Message:
        nonlocal size, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise Fault("timeout", "the body did not come in time") from None
        if message["type"] == "http.disconnect":
            raise Fault("invalid_request", "the client left before its body had come")
        size += len(message.get("body", b""))
        if size > most:
            raise too_large
        if not upload:
            take(len(message.get("body", b"")))
        whole = not message.get("more_body", False)
        return message

    return give


def _closing(send: Send) -> Send:
    """`send` that ends the connection after an error: the rest of the body is not read."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] >= 400:
            MutableHeaders(raw=message.setdefault("headers", []))["connection"] = "close"
        await send(message)

    return sending


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives the body once more, and then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again

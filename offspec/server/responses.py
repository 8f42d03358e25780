"""Responses while the client is there: JSON in one piece, or server-sent events as they come."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offspec.server.delta_stream import DeltaStream
from offspec.server.faults import CLIENT_GONE, Fault, internal

log = logging.getLogger("offspec.server")

QUIET = "offspec.quiet"  # in the scope of a request that needs no keep-alive, and its own status at any time
_KEEP_ALIVE_S = 10.0
# Many clients split a stream by Python's or JavaScript's idea of a line, which ends at these too.
_ESCAPED = {each.encode(): f"\\u{ord(each):04x}".encode() for each in "\x85\u2028\u2029"}
_LINE_ENDS = re.compile(b"|".join(_ESCAPED))
_T = TypeVar("_T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def list_page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list, in OpenAI's shape."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event with JSON in it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_line(data) + b"\n"


def json_line(data: Any) -> bytes:
    """A line of JSON."""
    return _LINE_ENDS.sub(lambda end: _ESCAPED[end[0]], msgspec.json.encode(data)) + b"\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """What a coroutine returns; None, and it is cancelled, where the client leaves first."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _kept_alive(work: Awaitable[_T], signal: Callable[[], Awaitable[None]]) -> _T:
    """Return the result of the work; call `signal` every few seconds until then."""
    doing = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((doing,), timeout=_KEEP_ALIVE_S))[0]:
            await signal()
        return doing.result()
    finally:
        doing.cancel()
        with suppress(BaseException):
            await doing


class WholeAnswer(Response):
    """An answer in one piece of JSON, which is abandoned if the client leaves.

    A slow answer has status 200 and spaces before its JSON, so that no client or proxy closes the connection
    for want of data. A fault then has this status too; before the first space it has its own.

    Args:
        answer: The answer.
        value: Makes the JSON of the answer.
        on_fault: Makes the JSON of a fault after status 200.
    """

    media_type = "application/json"

    def __init__(
        self, answer: DeltaStream, value: Coroutine[Any, Any, Any], on_fault: Callable[[Fault], Any]
    ) -> None:
        self._answer, self._value, self._on_fault = answer, value, on_fault
        self._begun = False
        self.status_code, self.background = 200, None
        self.init_headers({"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._value if QUIET in scope else _kept_alive(self._value, partial(self._send_space, send))
        async with self._answer:
            response = await unless_gone(receive, self._response(work))
        if not self._begun:
            await (response or Response(status_code=CLIENT_GONE))(scope, receive, send)
        elif response is not None:
            await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def _send_space(self, send: Send) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await _send(send, b" ")

    async def _response(self, work: Awaitable[Any]) -> Response:
        try:
            return json_response(await work)
        except Exception as error:
            if not self._begun:
                raise
            if not isinstance(error, Fault):
                log.exception("an answer could not be written")
            return json_response(self._on_fault(error if isinstance(error, Fault) else internal()))


class EventStream(Response):
    """Server-sent events of an answer, which is abandoned if the client leaves.

    Args:
        answer: What the events are made of.
        events: Its events, each in the bytes of an API.
        on_fault: The last event of an answer that goes wrong.
        keep_alive: Sent while there is nothing else to send, or returns it; a comment by default.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: DeltaStream,
        events: AsyncGenerator[bytes, None],
        on_fault: Callable[[Fault], bytes],
        keep_alive: bytes | Callable[[], bytes] = b": waiting\n\n",
    ) -> None:
        self._answer, self._events = answer, events
        self._on_fault, self._keep_alive = on_fault, keep_alive
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await self._send_all(send)
            except Fault as fault:
                await _send(send, self._on_fault(fault))
            except Exception:
                log.exception("an answer could not be written")
                await _send(send, self._on_fault(internal()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, send: Send) -> None:
        while (
            data := await _kept_alive(anext(self._events, None), partial(self._send_sign, send))
        ) is not None:
            await _send(send, data)

    async def _send_sign(self, send: Send) -> None:
        """Send a sign that the answer is under way."""
        await _send(send, self._keep_alive() if callable(self._keep_alive) else self._keep_alive)


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})

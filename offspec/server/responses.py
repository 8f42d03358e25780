"""How answers leave while the client is there: JSON in one piece, or server-sent events as they come."""

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offspec.server.answer import Answer
from offspec.server.faults import CLIENT_GONE, Fault, internal

log = logging.getLogger("offspec.server")

_KEEP_ALIVE_S = 10.0
# Many clients split a stream by Python's or JavaScript's idea of a line, which ends at these too.
_ESCAPED = {each.encode(): f"\\u{ord(each):04x}".encode() for each in "\x85\u2028\u2029"}
_LINE_ENDS = re.compile(b"|".join(_ESCAPED))
_T = TypeVar("_T")


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def event(data: Any, name: str = "") -> bytes:
    """A server-sent event with JSON in it."""
    head = f"event: {name}\n".encode() if name else b""
    text = _LINE_ENDS.sub(lambda end: _ESCAPED[end[0]], msgspec.json.encode(data))
    return head + b"data: " + text + b"\n\n"


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


async def whole(
    receive: Receive, answer: Answer, collect: Callable[[Answer], Coroutine[Any, Any, Any]]
) -> Response:
    """An answer in one piece of JSON, as `collect` makes it; broken off where the client leaves."""
    async with answer:
        value = await unless_gone(receive, collect(answer))
    return Response(status_code=CLIENT_GONE) if value is None else json_response(value)


class EventStream(Response):
    """Server-sent events of an answer, which is broken off where the client leaves.

    Args:
        answer: What the events are made of.
        events: Its events, each in the bytes of an API.
        on_fault: The last event of an answer that goes wrong.
        keep_alive: Sent while there is nothing else to send, or returns it; a comment by default.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
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
        following = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                done, _ = await asyncio.wait((following,), timeout=_KEEP_ALIVE_S)
                if not done:
                    keep_alive = self._keep_alive
                    await _send(send, keep_alive() if callable(keep_alive) else keep_alive)
                    continue
                if (data := following.result()) is None:
                    return
                await _send(send, data)
                following = asyncio.ensure_future(anext(self._events, None))
        finally:
            following.cancel()
            with suppress(BaseException):
                await following


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})

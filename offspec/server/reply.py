"""Answers in the form of an API, as events or in one piece, and HTTP responses while the client is there."""

import asyncio
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from offspec.server.api_errors import CLIENT_GONE, ApiError, internal
from offspec.server.protocol import Delta

log = logging.getLogger("offspec.server")

_KEEP_ALIVE_S = 10.0
Answer = AbstractAsyncContextManager[AsyncIterable[Delta]]  # its deltas; abandoned after the block
_T = TypeVar("_T")
Event = Any  # an object that is encoded as JSON
# Many clients split a stream by Python's or JavaScript's idea of a line, which ends at these too.
_ESCAPED = {each.encode(): f"\\u{ord(each):04x}".encode() for each in "\x85\u2028\u2029"}
_LINE_ENDS = re.compile(b"|".join(_ESCAPED))


class Reply(ABC):
    """One answer in the form of an API: the events of a stream, or one value.

    Args:
        streamed: Send events as they come. Otherwise only the value that `whole` returns is sent.
    """

    media_type = "text/event-stream"  # of a stream
    error_body: Callable[[ApiError], Event]  # a fault in the shape of the API

    def __init__(self, streamed: bool | None) -> None:
        self.streamed = bool(streamed)

    def begin(self) -> Iterable[Event]:
        """Return the events before the first delta."""
        return ()

    @abstractmethod
    def feed(self, delta: Delta) -> Iterable[Event]:
        """Return the events for a delta. It takes effect while they are iterated."""

    @abstractmethod
    async def end(self) -> Iterable[Event]:
        """Return the last events."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the whole answer, after its last event."""

    def fault(self, fault: ApiError) -> Event:
        """Return the last event, or the value, of an answer that fails."""
        return self.error_body(fault)

    def encode(self, event: Event) -> bytes:
        """Return the bytes of an event in a stream."""
        return sse_event(event)

    def keep_alive(self) -> bytes:
        """Return bytes to send while there is no event."""
        return b": waiting\n\n"

    async def events(self, deltas: AsyncIterable[Delta]) -> AsyncGenerator[Event, None]:
        """Yield all events of an answer."""
        for event in self.begin():
            yield event
        async for delta in deltas:
            for event in self.feed(delta):
                yield event
        for event in await self.end():
            yield event


def sse_event(data: Any, name: str = "") -> bytes:
    """Return a server-sent event with JSON in it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_line(data) + b"\n"


def json_line(data: Any) -> bytes:
    """Return a line of JSON."""
    return _LINE_ENDS.sub(lambda end: _ESCAPED[end[0]], msgspec.json.encode(data)) + b"\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A body of JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def list_page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """A page of a list, in OpenAI's shape."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of a coroutine; cancel it and return None if the client leaves first."""
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


def respond(answer: Answer, reply: Reply) -> Response:
    """Return the response with an answer in the form of an API, streamed or in one piece."""
    return EventStream(answer, reply) if reply.streamed else WholeAnswer(answer, reply)


class WholeAnswer(Response):
    """An answer in one piece of JSON, which is abandoned if the client leaves.

    A slow answer has status 200 and spaces before its JSON, so that no client or proxy closes the connection
    for want of data. A fault then has this status too; before the first space it has its own.

    Args:
        answer: The deltas of the answer.
        reply: Its form.
    """

    media_type = "application/json"

    def __init__(self, answer: Answer, reply: Reply) -> None:
        self._answer, self._reply = answer, reply
        self._begun = False
        self.status_code, self.background = 200, None
        self.init_headers({"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer as deltas:
            work = _kept_alive(self._whole(deltas), partial(self._send_space, send))
            response = await run_until_disconnect(receive, self._response(work))
        if not self._begun:
            await (response or Response(status_code=CLIENT_GONE))(scope, receive, send)
        elif response is not None:
            await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def value(self) -> Any:
        """Return the answer without HTTP. Raises ApiError."""
        async with self._answer as deltas:
            return await self._whole(deltas)

    async def _whole(self, deltas: AsyncIterable[Delta]) -> Any:
        async for _ in self._reply.events(deltas):
            pass
        return self._reply.whole()

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
            return json_response(self._reply.fault(_fault(error)))


class EventStream(Response):
    """The events of an answer as they come, which is abandoned if the client leaves.

    Args:
        answer: The deltas of the answer.
        reply: Its form.
    """

    def __init__(self, answer: Answer, reply: Reply) -> None:
        self._answer, self._reply = answer, reply
        self.status_code, self.background, self.media_type = 200, None, reply.media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer as deltas:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await run_until_disconnect(receive, self._write(deltas, send))

    async def _write(self, deltas: AsyncIterable[Delta], send: Send) -> None:
        async with aclosing(self._reply.events(deltas)) as events:
            try:
                await self._send_all(events, send)
            except Exception as error:
                await _send(send, self._reply.encode(self._reply.fault(_fault(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, events: AsyncGenerator[Event, None], send: Send) -> None:
        async def signal() -> None:
            await _send(send, self._reply.keep_alive())

        while (event := await _kept_alive(anext(events, None), signal)) is not None:
            await _send(send, self._reply.encode(event))


def _fault(error: Exception) -> ApiError:
    """Return the fault that ends an answer. A bug is logged."""
    if isinstance(error, ApiError):
        return error
    log.error("an answer could not be written", exc_info=error)
    return internal()


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class AnswerTimes:
    """Nanoseconds that an answer takes.

    prompt: from the request to the first token, its time in the queue included. answer: from the first token
    to the last; if all came at once, from the request. total: from the request to the last token.
    """

    def __init__(self) -> None:
        self._asked, self._first = time.perf_counter_ns(), 0
        self.prompt = self.answer = self.total = 1

    def note(self) -> None:
        """Note that something of the answer has come."""
        now = time.perf_counter_ns()
        self.total = max(now - self._asked, 1)
        if self._first:
            self.answer = max(now - self._first, 1)
        else:
            self._first, self.prompt, self.answer = now, self.total, self.total

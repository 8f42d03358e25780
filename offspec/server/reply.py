"""Answers in the format of an API, streamed or whole, and the HTTP responses that send them."""

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
Answer = AbstractAsyncContextManager[AsyncIterable[Delta]]  # deltas; the exit abandons the answer
_T = TypeVar("_T")
Event = Any  # object that can be encoded as JSON
# Many clients split a stream with Python's or JavaScript's line functions, which also split at these.
_ESCAPED = {each.encode(): f"\\u{ord(each):04x}".encode() for each in "\x85\u2028\u2029"}
_LINE_ENDS = re.compile(b"|".join(_ESCAPED))


class Reply(ABC):
    """Converter of one answer to the format of an API: the events of a stream, or one value.

    Args:
        streamed: Whether to stream events. If not, only the value that `whole` returns is sent.
    """

    media_type = "text/event-stream"  # media type of a stream
    error_body: Callable[[ApiError], Event]  # returns the body of an error in the format of the API

    def __init__(self, streamed: bool | None) -> None:
        self.streamed = bool(streamed)

    def begin(self) -> Iterable[Event]:
        """Return the events before the first delta."""
        return ()

    @abstractmethod
    def feed(self, delta: Delta) -> Iterable[Event]:
        """Yield the events for a delta. The reply changes only while they are iterated."""

    @abstractmethod
    async def end(self) -> Iterable[Event]:
        """Return the last events."""

    @abstractmethod
    def whole(self) -> Any:
        """Return the whole answer. Called after its last event."""

    def error(self, error: ApiError) -> Event:
        """Return the last event, or the value, of an answer that fails."""
        return self.error_body(error)

    def encode(self, event: Event) -> bytes:
        """Return the bytes of an event in a stream."""
        return sse_event(event)

    def keep_alive(self) -> bytes:
        """Return bytes to send if no event arrives for a while."""
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
    """Return a server-sent event with JSON data."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_line(data) + b"\n"


def json_line(data: Any) -> bytes:
    """Return JSON on one line, including the line end."""
    return _LINE_ENDS.sub(lambda end: _ESCAPED[end[0]], msgspec.json.encode(data)) + b"\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")


def list_page(data: Sequence[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """Return a page of a list in OpenAI's format."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": has_more, **ends}


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of a coroutine; cancel it and return None if the client disconnects first."""
    working, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _with_keep_alive(work: Awaitable[_T], signal: Callable[[], Awaitable[None]]) -> _T:
    """Return the result of an awaitable; call `signal` every few seconds until then."""
    working = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait((working,), timeout=_KEEP_ALIVE_S))[0]:
            await signal()
        return working.result()
    finally:
        working.cancel()
        with suppress(BaseException):
            await working


def respond(answer: Answer, reply: Reply) -> Response:
    """Return the HTTP response for an answer, streamed or whole."""
    return EventStream(answer, reply) if reply.streamed else WholeAnswer(answer, reply)


class WholeAnswer(Response):
    """Response with the whole answer as JSON. The answer is abandoned if the client disconnects.

    A slow answer has status 200 and spaces before its JSON, so that no client or proxy closes an idle
    connection. An error after the first space also has status 200; an earlier error has its own status.

    Args:
        answer: Deltas of the answer.
        reply: Converter to the format of the API.
    """

    media_type = "application/json"

    def __init__(self, answer: Answer, reply: Reply) -> None:
        self._answer, self._reply = answer, reply
        self._begun = False
        self.status_code, self.background = 200, None
        self.init_headers({"x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answer as deltas:
            work = _with_keep_alive(self._whole(deltas), partial(self._send_space, send))
            response = await run_until_disconnect(receive, self._response(work))
        if not self._begun:
            await (response or Response(status_code=CLIENT_GONE))(scope, receive, send)
        elif response is not None:
            await send({"type": "http.response.body", "body": response.body, "more_body": False})

    async def value(self) -> Any:
        """Return the body of the answer, without HTTP. Raises ApiError if the answer fails."""
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
            return json_response(self._reply.error(_as_api_error(error)))


class EventStream(Response):
    """Response that streams the events of an answer. The answer is abandoned if the client disconnects.

    Args:
        answer: Deltas of the answer.
        reply: Converter to the format of the API.
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
                await _send(send, self._reply.encode(self._reply.error(_as_api_error(error))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_all(self, events: AsyncGenerator[Event, None], send: Send) -> None:
        async def signal() -> None:
            await _send(send, self._reply.keep_alive())

        while (event := await _with_keep_alive(anext(events, None), signal)) is not None:
            await _send(send, self._reply.encode(event))


def _as_api_error(error: Exception) -> ApiError:
    """Return the API error for an exception. An unexpected exception is logged as an internal error."""
    if isinstance(error, ApiError):
        return error
    log.error("cannot write an answer", exc_info=error)
    return internal()


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class AnswerTimes:
    """Timing of an answer, in nanoseconds.

    prompt: from the request to the first token, including the time in the queue. answer: from the first token
    to the last, or from the request if all tokens arrived together. total: from the request to the last
    token.
    """

    def __init__(self) -> None:
        self._start, self._first = time.perf_counter_ns(), 0
        self.prompt = self.answer = self.total = 1

    def note(self) -> None:
        """Record that a part of the answer has arrived."""
        now = time.perf_counter_ns()
        self.total = max(now - self._start, 1)
        if self._first:
            self.answer = max(now - self._first, 1)
        else:
            self._first, self.prompt, self.answer = now, self.total, self.total

"""The form of an answer in one API: the interface that each API implements, and its encodings."""

import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from typing import Any

import msgspec

from offspec.server.exchange import Delta
from offspec.server.faults import Fault

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

    @abstractmethod
    def fault(self, fault: Fault) -> Event:
        """Return the last event, or the value, of an answer that fails."""

    def encode(self, event: Event) -> bytes:
        """Return the bytes of an event in a stream."""
        return server_sent(event)

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


def server_sent(data: Any, name: str = "") -> bytes:
    """Return a server-sent event with JSON in it."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json_line(data) + b"\n"


def json_line(data: Any) -> bytes:
    """Return a line of JSON."""
    return _LINE_ENDS.sub(lambda end: _ESCAPED[end[0]], msgspec.json.encode(data)) + b"\n"

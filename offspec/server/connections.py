"""Connection limits: their number, and timeouts for slow headers and unread answers."""

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

REFUSED = "offspec.refused"  # key in the state of requests on connections over the limit
HEADER_S = 20.0  # time limit from the first byte of a request to the end of its headers
WRITE_S = 60.0  # time limit for a client that reads nothing
MAX_CONNECTIONS = 512  # further connections are refused


class LimitedConnection(H11Protocol):
    """HTTP/1.1 with limits that uvicorn does not have.

    uvicorn refuses requests over its connection limit in plain text. `AdmissionMiddleware` refuses them in
    the format of the API instead.
    """

    header_seconds, write_seconds, most = HEADER_S, WRITE_S, MAX_CONNECTIONS

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if max(len(self.connections), len(self.tasks) + 1) > self.most:
            self.app_state = {**self.app_state, REFUSED: True}
        # asyncio sets this only if the listening socket was created with an explicit protocol. Without it,
        # each event is delayed up to 40 ms, until the previous one is acknowledged.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._start_timer(self.header_seconds)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            if self._timer is None:
                self._start_timer(self.header_seconds)
        elif not self.flow.write_paused:
            self._cancel_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_timer(self.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def _start_timer(self, seconds: float) -> None:
        """Abort the connection after this time unless the timer is cancelled."""
        self._cancel_timer()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

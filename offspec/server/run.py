"""Server process: listening socket, uvicorn and signal handling."""

import asyncio
import ipaddress
import logging
import os
import signal
import socket
from types import FrameType
from typing import NoReturn

import uvicorn

from offspec.core.errors import RequestError
from offspec.core.files import remove_partial_files
from offspec.server.app import make_app
from offspec.server.batch.jobs import BatchJobs
from offspec.server.connections import MAX_CONNECTIONS, LimitedConnection
from offspec.server.cors import ANY
from offspec.server.service import Loader, Service
from offspec.server.settings import Settings

log = logging.getLogger("offspec.server")

_CLOSING_S = 60.0  # time limit for closing the engine, which writes the latest conversation to disk
_LOADING_S = 0.5  # time limit for a load in progress to finish or fail after a stop signal
_HEADER_BYTES = 64 * 2**10
_KEEP_ALIVE_S = 30  # maximum idle time of a connection between requests


def serve(load: Loader, settings: Settings) -> None:
    """Serve until a stop signal arrives.

    Raises:
        RequestError: The server cannot listen on the address.
        KeyboardInterrupt: Ctrl-C stopped the server.
        SystemExit: SIGTERM stopped the server.
        OffspecError: The model cannot be loaded.
    """
    with _listen(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if settings.api_key is None and not _is_loopback(host):
            log.warning(
                "warning: without an API key, anyone who can reach this machine can use the model; "
                "set OFFSPEC_API_KEY, or omit `host`"
            )
        if settings.api_key is None and ANY in settings.origins:
            log.warning(
                "warning: without an API key, any web page in a browser on this machine can use the model; "
                "set OFFSPEC_API_KEY, or list allowed pages with `cors_origin`"
            )
        log.info("listening on http://%s:%d, and loading %s", shown, port, settings.served_model_names[0])
        server = Server(load, settings, listener)
        server.run()
    if not server.service.join(_CLOSING_S if server.service.loaded else _LOADING_S):
        # The thread cannot be cancelled, and the interpreter might crash if it exits while the thread runs.
        logging.shutdown()
        _end_now(server.signal or 0)
    if server.service.error is not None:
        raise server.service.error
    if server.signal == signal.SIGINT:
        raise KeyboardInterrupt
    if server.signal is not None:
        raise SystemExit(128 + server.signal)


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).partition(" (while attempting")[0]
        raise RequestError(
            f"cannot listen on {host}:{port}: {reason}; choose another `host` or `port`"
        ) from None


def _end_now(signum: int) -> NoReturn:
    """Remove unfinished files and end the process with the signal's exit status."""
    remove_partial_files()
    os._exit(128 + signum)


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback


class Server(uvicorn.Server):
    """uvicorn server on one socket, which also starts and stops the service and its batches.

    signal: received stop signal, or None. service: service that answers requests. batches: files and batches
    of clients.

    Args:
        load: Loads the engine.
        settings: Settings of the server.
        listener: Listening socket.
    """

    def __init__(self, load: Loader, settings: Settings, listener: socket.socket) -> None:
        self._listener, self._patience = listener, settings.shutdown_timeout
        self.signal: int | None = None
        self.service = Service(load, settings, self._fail)
        self.batches = BatchJobs(self.service)
        local = _is_loopback(listener.getsockname()[0])
        super().__init__(
            uvicorn.Config(
                make_app(self.service, self.batches, local=local),
                http=LimitedConnection,
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=round(settings.shutdown_timeout) + 2,
                h11_max_incomplete_event_size=_HEADER_BYTES,
            )
        )

    def _fail(self) -> None:
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a stop signal arrives or `should_exit` is set."""
        super().run([*(sockets or ()), self._listener])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.service.start()
        self.batches.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.ensure_future(self.service.stop(self._patience))
        await super().shutdown(sockets)
        await stopping
        await self.batches.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.signal is not None:  # a second signal stops at once
            _end_now(sig)
        self.signal, self.should_exit = sig, True
        log.info(
            "stopping: running answers have %g seconds to finish; a second signal stops at once",
            self._patience,
        )

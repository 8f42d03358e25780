"""A real server on a local port, in a thread of the test's own process.

with LiveServer(ScriptedEngine()) as server:
    server.client().chat.completions.create(...)
"""

import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import anthropic
import httpx2
import openai

from offspec.engine.engine import Engine
from offspec.server.run import Server
from offspec.server.settings import Settings
from tests.support.fake_engine import ScriptedEngine
from tests.support.waiting import PATIENCE

NAME = "tiny"


class LiveServer:
    """A server that runs during the block, which begins when the model is loaded.

    url: its address. server, service: the running objects.

    Args:
        served: An engine, or a function that loads one.
        ready: False to begin the block while the model is loading.
        settings: Fields of `Settings` in addition to the address.
    """

    def __init__(
        self, served: Engine | ScriptedEngine | Callable[..., Any], *, ready: bool = True, **settings: Any
    ) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        # A response of half a megabyte must not fit into the buffers between server and client.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        given: dict[str, Any] = {"served_model_names": (NAME,), **settings}
        self._key, self._ready = given.get("api_key"), ready
        load: Any = served if callable(served) else lambda notify: served
        self.server = Server(load, Settings("127.0.0.1", self.port, **given), self._listener)
        self.service = self.server.service
        self._thread = threading.Thread(target=self.server.run, name="server under test", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._until(lambda: self.server.started, "the server does not listen")
        if self._ready:
            self._until(lambda: self.service.state != "loading", "the model is not loaded")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server as a signal does."""
        self.server.should_exit = True
        self.wait()

    def wait(self) -> None:
        """Wait until the server has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive(), f"the server does not end: {self._seen()}"
        assert self.service.join(PATIENCE), f"the engine's thread does not end: {self._seen()}"
        self._listener.close()

    def client(self, **more: Any) -> openai.OpenAI:
        """OpenAI's own client, connected to this server."""
        given = {"api_key": self._key or "none", "max_retries": 0, "timeout": PATIENCE, **more}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def anthropic(self, **more: Any) -> anthropic.Anthropic:
        """Anthropic's own client, connected to this server."""
        given = {"api_key": self._key or "none", "max_retries": 0, "timeout": PATIENCE, **more}
        return anthropic.Anthropic(base_url=self.url, **given)

    def http(self) -> httpx2.Client:
        """A plain HTTP client that sends the key."""
        headers = {"authorization": f"Bearer {self._key}"} if self._key else {}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=PATIENCE, trust_env=False)

    def wait_until_idle(self) -> None:
        """Wait until the engine's thread is idle."""
        self._until(lambda: not self.service.in_flight, "the engine is not idle")

    def _until(self, condition: Callable[[], bool], trouble: str) -> None:
        """Wait for the server's threads; fail if the condition does not come, or the server has ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{trouble}: {self._seen()}"
            assert self._thread.is_alive() or condition(), f"{trouble}, and the server ended: {self._seen()}"
            time.sleep(0.005)

    def _seen(self) -> str:
        service = self.service
        waiting = f"{service.queue_length} of {service.in_flight} requests wait"
        return f"state {service.state}, stage {service.progress.stage!r}, error {service.error!r}, {waiting}"

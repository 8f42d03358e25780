"""Lines become requests to the server's own application, without a socket between; answers become results."""

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message

from offspec.core.errors import ClosedError
from offspec.server.batch.lines import Line
from offspec.server.openai_common import error_body
from offspec.server.responses import QUIET

LONGEST = 1 << 30  # bytes of a body: what a file has is the user's own
_STOPPING = 503  # the status of an answer that was broken off because the run ends
_REFUSED = 429  # there was no room for it: it is asked again
_MOST_FAILURES = 3  # in a row of the engine itself: then it is not the lines that are wrong

Take = Callable[[Line, int, dict[str, Any]], Awaitable[None]]  # a line, its status, the body of its answer


async def _at_once() -> None:
    """Wait for nothing."""


class Answering:
    """Answers lines.

    Args:
        app: Answers requests.
        model: What lines ask that name no model.
        take: Keeps what comes of each line.
        in_flight: Requests that the application has at a time.
        turn: Waits until the next may be sent.
    """

    def __init__(
        self,
        app: ASGIApp,
        model: str,
        take: Take,
        *,
        in_flight: int = 2,
        turn: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        self._app, self._model, self._take, self._in_flight, self._turn = app, model, take, in_flight, turn
        self._failures = 0  # in a row of the engine itself
        self._reading = asyncio.Lock()

    async def run(self, lines: Iterator[Line]) -> None:
        """Answer all lines, which are read in a thread.

        Raises:
            ClosedError: The service stops, or its engine fails again and again.
            OffspecError: A line cannot be read, or its result kept.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._in_flight):
                    group.create_task(self._work(lines))
        except* Exception as errors:
            raise errors.exceptions[0] from None

    async def _work(self, lines: Iterator[Line]) -> None:
        while (line := await self._next(lines)) is not None:
            status, value = await self._answer(line)
            self._failures = self._failures + 1 if status >= 500 else 0
            if status == _STOPPING or self._failures >= _MOST_FAILURES:
                raise ClosedError(f"the batch stopped at line {line.number}: {value['error']['message']}")
            await self._take(line, status, value)

    async def _next(self, lines: Iterator[Line]) -> Line | None:
        async with self._reading:
            return await asyncio.to_thread(next, lines, None)

    async def _answer(self, line: Line) -> tuple[int, dict[str, Any]]:
        if line.fault is not None:
            return line.fault.status, error_body(line.fault)
        while True:
            await self._turn()
            status, body = await ask(self._app, line.url, line.request(self._model))
            if status != _REFUSED:
                return status, json.loads(body)
            await asyncio.sleep(0.1)


async def ask(app: ASGIApp, path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of what an application answers to JSON posted to a path."""
    length = str(len(body)).encode()
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        QUIET: True,
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", length),
            (b"host", b"localhost"),
        ],
    }
    sent, status, parts = False, 0, list[bytes]()

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # no client that could leave
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, b"".join(parts)


def result(line: Line, status: int, value: dict[str, Any]) -> dict[str, Any]:
    """The line of the results, in the format of its request."""
    if not line.plain:
        name = "batch_req_" + hashlib.sha256(line.id.encode("utf-8", "replace")).hexdigest()[:24]
        response = {"status_code": status, "request_id": value.get("id") or name, "body": value}
        return {"id": name, "custom_id": line.id, "response": response, "error": None}
    if status != 200:
        return {"id": line.id, "error": value["error"]["message"]}
    choices = value["choices"]
    usage = {name: value["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    texts = [choice["message"]["content"] for choice in choices]
    answer = {"text": texts[0]} if len(texts) == 1 else {"texts": texts}
    return {"id": line.id, **answer, "finish_reason": choices[0]["finish_reason"], **usage}

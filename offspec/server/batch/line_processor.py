"""Processor of batch lines: calls the server's endpoints without HTTP and converts answers to results."""

import asyncio
import hashlib
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from offspec.core.errors import ClosedError
from offspec.server.api_errors import CLIENT_GONE, ApiError, internal, openai_error
from offspec.server.batch.lines import ENDPOINTS, Line
from offspec.server.endpoint import ApiRequest
from offspec.server.protocol import Usage
from offspec.server.reply import WholeAnswer
from offspec.server.service import Service

log = logging.getLogger("offspec.server")
access_log = logging.getLogger("offspec.server.access")

_STOPPING = 503  # status of an answer that was aborted because the service stops
_REFUSED = 429  # status of a line that found the queue full and is retried
_MOST_FAILURES = 3  # consecutive server errors after which the run stops

Take = Callable[[Line, int, dict[str, Any]], Awaitable[None]]  # line, status, body of the answer


class LineProcessor:
    """Processor that answers lines concurrently.

    Args:
        service: Service that answers requests.
        model: Model of lines that do not name one.
        take: Called with the result of each line.
        in_flight: Number of concurrent requests.
        turn: Called before each request; it waits until the request may be sent. None: send it at once.
    """

    def __init__(
        self,
        service: Service,
        model: str,
        take: Take,
        *,
        in_flight: int,
        turn: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._service, self._model, self._take, self._turn = service, model, take, turn
        self._in_flight = in_flight
        self._failures = 0  # number of consecutive server errors
        self._reading = asyncio.Lock()

    async def run(self, lines: Iterator[Line]) -> None:
        """Answer all lines. The iterator is read in a thread.

        Raises:
            ClosedError: The service is stopping, or its engine fails repeatedly.
            OffspecError: A line cannot be read, or a result cannot be written.
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
            return line.fault.status, openai_error(line.fault)
        while True:
            if self._turn is not None:
                await self._turn()
            began, status = time.perf_counter(), CLIENT_GONE
            try:
                status, value = await self._call_endpoint(line)
            finally:
                seconds, name = time.perf_counter() - began, f"req_{secrets.token_hex(12)}"
                self._service.metrics.record_request(line.url, status, seconds)
                access_log.info("- POST %s %d %.3fs %s", line.url, status, seconds, name)
            if status != _REFUSED:
                return status, value
            await asyncio.sleep(0.1)

    async def _call_endpoint(self, line: Line) -> tuple[int, dict[str, Any]]:
        """Return the status and body of the answer to a line."""
        endpoint, body = ENDPOINTS[line.url], line.request(self._model)
        try:
            response = await endpoint.answer(ApiRequest(self._service, line.url, body, endpoint.body))
            assert isinstance(response, WholeAnswer), "lines do not stream"
            return 200, await response.value()
        except ApiError as error:
            return error.status, openai_error(error)
        except Exception:
            log.exception("line %d of a batch failed", line.number)
            return 500, openai_error(internal())


def result(line: Line, status: int, value: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a line, in the line's format."""
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


def parse_usage(body: dict[str, Any]) -> Usage:
    """Return the token counts in the body of an answer of any OpenAI API; missing counts are 0."""
    usage = body.get("usage") or {}
    prompt = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    answer = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
    return Usage(
        prompt_tokens=usage.get("prompt_tokens") or usage.get("input_tokens") or 0,
        cached_tokens=prompt.get("cached_tokens") or 0,
        answer_tokens=usage.get("completion_tokens") or usage.get("output_tokens") or 0,
        reasoning_tokens=answer.get("reasoning_tokens") or 0,
    )

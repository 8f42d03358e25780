"""Runner of clients' batches, from validation to results."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from offspec.core.errors import ClosedError, OffspecError, RequestError
from offspec.server.api_errors import api_error_from, internal
from offspec.server.batch.line_processor import LineProcessor, result
from offspec.server.batch.lines import Line, read_lines
from offspec.server.batch.record_store import PRIVATE, RecordStore
from offspec.server.batch.results import ResultFile
from offspec.server.batch.stored_batch import BatchError, Status, StoredBatch, count_results
from offspec.server.batch.stored_files import StoredFiles
from offspec.server.service import Service
from offspec.server.threads import run_in_thread

log = logging.getLogger("offspec.server")

_MOST_ERRORS = 100
_LAST: dict[Status, Status] = {"finalizing": "completed", "cancelling": "cancelled"}


class BatchRunner:
    """Runner that answers batches one after the other.

    Args:
        service: Service that answers the lines.
        files: Store of the files with lines and results.
        batches: Store of the batches; each change of a status is saved.
    """

    most_lines = 10_000  # maximum number of lines of a batch

    def __init__(self, service: Service, files: StoredFiles, batches: RecordStore[StoredBatch]) -> None:
        self._service, self._files, self._batches = service, files, batches
        self._turns = asyncio.Lock()

    async def run(self, batch: StoredBatch) -> None:
        """Run a batch from its current status to its end.

        If the task is cancelled because the server stops, the batch keeps its status. If the client cancelled
        the batch, its finished answers become its results.
        """
        with _unless_cancelling(batch):
            try:
                await self._validate_and_answer(batch)
            except Exception as error:
                if self._service.state != "ready":
                    return  # interrupted; the batch continues after a restart
                batch.troubles = [_batch_error(error)]
        with _unless_cancelling(batch):
            await run_in_thread(self._collect, batch)
        await self.set_status(batch, _LAST.get(batch.status, "failed"))
        log.info("%s is %s: %d answers, %d errors", batch.id, batch.status, batch.completed, batch.failed)

    async def set_status(self, batch: StoredBatch, status: Status) -> None:
        """Set and save the status of a batch."""
        batch.set_status(status)
        await run_in_thread(self._batches.save, batch)

    async def _validate_and_answer(self, batch: StoredBatch) -> None:
        if batch.status == "validating":
            path = self._files.path(batch.input)
            batch.total, batch.troubles = await asyncio.to_thread(
                _validate, path, batch.endpoint, self.most_lines
            )
            if batch.troubles:
                return
            await self.set_status(batch, "in_progress")
        if batch.status == "in_progress":
            async with self._turns:
                await self._answer(batch)
            await self.set_status(batch, "finalizing")

    async def _answer(self, batch: StoredBatch) -> None:
        """Answer the remaining lines of a batch. Raises the first error of the run."""
        opened = ExitStack()
        paths = self._files.path(batch.output), self._files.path(batch.errors)

        def open_files() -> list[ResultFile]:
            return [opened.enter_context(ResultFile(path, PRIVATE)) for path in paths]

        try:
            await self._answer_into(batch, *await run_in_thread(open_files))
        finally:
            await run_in_thread(opened.close)

    async def _answer_into(self, batch: StoredBatch, answers: ResultFile, errors: ResultFile) -> None:
        done = answers.done | errors.done

        def count() -> None:
            batch.completed, batch.failed = len(answers.done), len(errors.done)

        async def take(line: Line, status: int, value: dict[str, Any]) -> None:
            file = answers if status == 200 else errors
            await run_in_thread(file.add, line.id, result(line, status, value))
            count()

        count()
        lines = (line for line in read_lines(self._files.path(batch.input)) if line.id not in done)
        model = batch.model if batch.model in self._service.names else self._service.names[0]
        await self._ready()
        processor = LineProcessor(
            self._service, model, take, in_flight=self._service.engine.sequences, turn=self._wait_until_idle
        )
        await processor.run(lines)

    async def _ready(self) -> None:
        while self._service.state != "ready":
            await asyncio.sleep(0.05)

    async def _wait_until_idle(self) -> None:
        """Wait until a sequence is free and no client's request is queued, because those take precedence."""
        pause = 0.001
        while self._service.state != "ready" or self._service.in_flight >= self._service.engine.sequences:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _collect(self, batch: StoredBatch) -> None:
        """Count the results of a batch and make them available to clients."""
        paths = self._files.path(batch.output), self._files.path(batch.errors)
        for path in paths:
            with ResultFile(path, PRIVATE):
                pass  # opening removes an incomplete last line, left by a killed server
        batch.completed, batch.usage = count_results(paths[0])
        batch.failed, _ = count_results(paths[1])
        batch.has_output = self._files.register(batch.output, f"{batch.id}_output.jsonl", batch.kept_s)
        batch.has_errors = self._files.register(batch.errors, f"{batch.id}_error.jsonl", batch.kept_s)


@contextmanager
def _unless_cancelling(batch: StoredBatch) -> Iterator[None]:
    """Suppress CancelledError in the block if a client cancelled the batch, but not if the server stops."""
    try:
        yield
    except asyncio.CancelledError:
        if batch.status != "cancelling":
            raise


def _validate(path: Path, endpoint: str, most_lines: int) -> tuple[int, list[BatchError]]:
    """Return the number of lines of a file, and the errors that make the whole batch invalid.

    Errors of a single request are not included; they are reported in the result of its line.
    """
    total, errors = 0, list[BatchError]()
    try:
        for line in read_lines(path, "the file"):
            total += 1
            if total > most_lines:
                errors.append(BatchError("too_many_lines", f"the file has more than {most_lines} lines"))
                break
            if (error := _line_error(line, endpoint)) is not None:
                errors.append(error)
            if len(errors) == _MOST_ERRORS:
                break
    except RequestError as request_error:
        errors.append(BatchError("duplicate_custom_id", str(request_error)))
    if not total:
        errors.append(BatchError("empty_file", "the file has no lines"))
    return total, errors


def _line_error(line: Line, endpoint: str) -> BatchError | None:
    if line.fault is not None and not line.url:
        return BatchError(
            line.fault.code or "invalid_line", line.fault.message, line.number, line.fault.field
        )
    if line.plain:
        message = "the line must have custom_id, method, url and body"
        return BatchError("invalid_line", message, line.number)
    if line.url != endpoint:
        message = f"url: it must be the endpoint of the batch, {endpoint}, not {line.url}"
        return BatchError("invalid_url", message, line.number, "url")
    return None


def _batch_error(error: Exception) -> BatchError:
    """Return the reason why a batch failed, without details that are only for the server's log."""
    if isinstance(error, ClosedError):
        return BatchError("server_error", str(error))
    log.error("a batch failed: %s", error, exc_info=not isinstance(error, OffspecError))
    api_error = api_error_from(error) if isinstance(error, OffspecError) else internal()
    return BatchError("server_error", api_error.message)

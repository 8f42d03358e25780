"""Batches that clients have asked for: they are answered while nobody else asks, through any restart.

A batch is what its files say: its description, its lines, and what was answered already. So there is nothing
to be saved when a server ends, however it ends, and the next one goes on from there.
"""

import asyncio
import hashlib
import logging
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from offspec.core.errors import ClosedError, OffspecError
from offspec.core.file_lock import lock_beside, release
from offspec.core.files import private_folder
from offspec.core.private import data_root
from offspec.server.batch.answering import Answering, result
from offspec.server.batch.lines import Line, read_lines
from offspec.server.batch.records import PRIVATE, Records
from offspec.server.batch.results import ResultFile
from offspec.server.batch.stored_batch import Status, StoredBatch, Trouble, count_results
from offspec.server.batch.stored_files import KEPT_S, StoredFiles
from offspec.server.batch.validation import validate
from offspec.server.faults import Fault, internal, of_error
from offspec.server.service import Service
from offspec.server.threads import in_thread

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger("offspec.server")

_MOST_UNFINISHED = 64
_MOST_LINES = 10_000
_LAST: dict[Status, Status] = {"finalizing": "completed", "cancelling": "cancelled"}


def batches_folder(name: str) -> Path:
    """Where a server that answers by a name keeps files and batches: in the user's data folder."""
    readable = re.sub(r"[^\w.-]+", "-", name)[-80:].lstrip(".")
    return data_root() / "batches" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class BatchJobs:
    """Files and batches of one server.

    Methods are called on the event loop, and use the disk in threads. What clients ask for most often, a
    description or a list, is read from memory.

    Args:
        service: Answers.
        folder: Where they are, by default one for the model's own name. One server at a time has it.
        in_flight: Lines that the service has at a time. None: as many as it answers side by side.
        most_lines: Of a batch.
        most_bytes: Of all files.
    """

    def __init__(
        self,
        service: Service,
        folder: Path | None = None,
        *,
        in_flight: int | None = None,
        most_lines: int = _MOST_LINES,
        most_bytes: int = 2**30,
    ) -> None:
        self._service, self._in_flight, self.most_lines = service, in_flight, most_lines
        self._folder = folder or batches_folder(service.names[-1])
        self.files = StoredFiles(self._folder, most_bytes)
        self.batches = Records(self._folder, StoredBatch, "batch_", "batch")
        self._held: BaseFileLock | None = None
        self._app: ASGIApp | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks = dict[str, asyncio.Task[None]]()
        self._turns = asyncio.Lock()  # one batch after the other
        self._changes = asyncio.Lock()  # held while files and batches are added or removed

    def start(self, app: ASGIApp) -> None:
        """Begin to resume what is not finished. app: answers requests."""
        self._app = app
        self._starting = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        try:
            if await in_thread(self._folder.exists):
                await self.open()
        except (Fault, OSError) as error:
            log.warning("batches are not resumed: %s", error)

    async def close(self) -> None:
        """Stop, and let another server have the folder."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._held is not None:
            await in_thread(release, self._held)
            self._held = None

    async def open(self) -> None:
        """Lock the folder and read it, unless this server has done so. Raises Fault if that is impossible."""
        if self._held is not None:
            return
        async with self._changes:
            if self._held is None:
                self._held = await in_thread(self._lock_and_load)
                for batch in self.batches.all():
                    if batch.is_unfinished:
                        self._begin(batch)

    def _lock_and_load(self) -> "BaseFileLock":
        from filelock import Timeout

        try:
            private_folder(self._folder)
            lock = lock_beside(self._folder)
            lock.acquire(timeout=0)
        except Timeout:
            message = "another server of this model has the files and batches: ask that one"
            raise Fault("unavailable", message, retry_after=60) from None
        except OSError as error:
            log.error(
                "files cannot be kept in %s: %s; set OFFSPEC_DATA to another folder", *(self._folder, error)
            )
            raise Fault("server", "files cannot be kept here; the server's log says why") from None
        self.batches.load()
        self.files.open(self._needed())
        self._remove(*self._expired())
        return lock

    async def expire(self) -> None:
        """Remove files and batches whose time is over."""
        if any(self._expired()):
            async with self._changes:
                await in_thread(self._remove, *self._expired())

    def _expired(self) -> tuple[list[str], list[str]]:
        """Ids of files and of batches whose time is over."""
        ended = [batch for batch in self.batches.all() if not batch.is_unfinished]
        over = [batch.id for batch in ended if batch.ended_at + KEPT_S < time.time()]
        return self.files.expired(self._needed()), over

    def _remove(self, files: list[str], batches: list[str]) -> None:
        for id in files:
            self.files.remove(id)
        for id in batches:
            self.batches.remove(id)

    async def remove_file(self, id: str) -> None:
        """Remove a file. Raises Fault where a batch that is not finished needs it."""
        async with self._changes:
            self.files.records.get(id)
            if id in self._needed():
                message = "a batch that is not finished needs the file: cancel that first"
                raise Fault("invalid_request", message)
            await in_thread(self.files.remove, id)

    async def create(
        self, input: str, endpoint: str, metadata: dict[str, str] | None, kept_s: int | None
    ) -> StoredBatch:
        """Begin a batch of the lines of a file; see StoredBatch. Raises Fault."""
        async with self._changes:
            batch = self._new_batch(input, endpoint)
            batch.metadata, batch.kept_s = metadata, kept_s
            await in_thread(self.batches.save, batch)
            self._begin(batch)
        return batch

    def _new_batch(self, input: str, endpoint: str) -> StoredBatch:
        if self.files.records.get(input, "input_file_id").purpose != "batch":
            message = "input_file_id: the file's purpose must be batch"
            raise Fault("invalid_request", message, field="input_file_id")
        if sum(batch.is_unfinished for batch in self.batches.all()) >= _MOST_UNFINISHED:
            message = f"{_MOST_UNFINISHED} batches are not finished yet, and no more may wait"
            raise Fault("rate_limit", message, retry_after=60)
        ids = self.files.records.fresh_id(), self.files.records.fresh_id()
        model, order = self._service.names[0], time.time_ns()
        return StoredBatch(self.batches.fresh_id(), order, model, endpoint, input, *ids)

    async def cancel(self, id: str) -> StoredBatch:
        """Begin to break a batch off. Raises Fault where it is too late."""
        batch = self.batches.get(id)
        if batch.status in ("validating", "in_progress"):
            if (task := self._tasks.get(id)) is not None:  # else it failed, and waits for a restart
                task.cancel()
            await self._become(batch, "cancelling")
        elif batch.status != "cancelling":
            raise Fault("invalid_request", f"the batch cannot be cancelled: it is {batch.status}")
        return batch

    def _needed(self) -> set[str]:
        """Ids of files that batches need which are not finished."""
        unfinished = [batch for batch in self.batches.all() if batch.is_unfinished]
        return {id for batch in unfinished for id in (batch.input, batch.output, batch.errors)}

    async def _become(self, batch: StoredBatch, status: Status) -> None:
        batch.become(status)
        await in_thread(self.batches.save, batch)

    def _begin(self, batch: StoredBatch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[batch.id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s cannot go on before the server is restarted: %s", batch.id, error)

        task.add_done_callback(ended)

    async def _run(self, batch: StoredBatch) -> None:
        """Take a batch from where it is to its end."""
        try:
            if batch.status == "validating":
                await self._validate(batch)
            if batch.status == "in_progress":
                async with self._turns:
                    await self._answer(batch)
                await self._become(batch, "finalizing")
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise  # the server stops
        except Exception as error:
            if self._service.state != "ready":
                return  # it was broken off, and goes on when there is a server again
            batch.troubles = [_trouble(error)]
        await in_thread(self._collect, batch)
        await self._become(batch, _LAST.get(batch.status, "failed"))
        log.info("%s is %s: %d answers, %d errors", batch.id, batch.status, batch.completed, batch.failed)

    async def _validate(self, batch: StoredBatch) -> None:
        given = self.files.path(batch.input), batch.endpoint, self.most_lines
        batch.total, batch.troubles = await asyncio.to_thread(validate, *given)
        if not batch.troubles:
            await self._become(batch, "in_progress")

    async def _answer(self, batch: StoredBatch) -> None:
        """Answer what is not answered yet. Raises what it fails with."""
        opened = ExitStack()
        paths = self.files.path(batch.output), self.files.path(batch.errors)

        def open_files() -> list[ResultFile]:
            return [opened.enter_context(ResultFile(path, PRIVATE)) for path in paths]

        try:
            await self._answer_into(batch, *await in_thread(open_files))
        finally:
            await in_thread(opened.close)

    async def _answer_into(self, batch: StoredBatch, answers: ResultFile, errors: ResultFile) -> None:
        done = answers.done | errors.done

        def count() -> None:
            batch.completed, batch.failed = len(answers.done), len(errors.done)

        async def take(line: Line, status: int, value: dict[str, Any]) -> None:
            file = answers if status == 200 else errors
            await in_thread(file.add, line.id, result(line, status, value))
            count()

        count()
        lines = (line for line in read_lines(self.files.path(batch.input)) if line.id not in done)
        model = batch.model if batch.model in self._service.names else self._service.names[0]
        await self._ready()
        assert self._app is not None, "started"
        answering = Answering(self._app, model, take, in_flight=self._most, turn=self._turn)
        await answering.run(lines)

    @property
    def _most(self) -> int:
        return self._in_flight or self._service.sequences

    async def _ready(self) -> None:
        """Wait until the model is loaded."""
        while self._service.state != "ready":
            await asyncio.sleep(0.05)

    async def _turn(self) -> None:
        """Wait until a request would be answered at once: those of clients go first."""
        pause = 0.001
        while self._service.state != "ready" or self._service.in_flight >= self._most:
            await asyncio.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _collect(self, batch: StoredBatch) -> None:
        """Count what has come of a batch, and let clients see it."""
        paths = self.files.path(batch.output), self.files.path(batch.errors)
        for path in paths:
            with ResultFile(path, PRIVATE):
                pass  # what a kill has cut is removed
        batch.completed, batch.usage = count_results(paths[0])
        batch.failed, _ = count_results(paths[1])
        batch.has_output = self.files.adopt(batch.output, f"{batch.id}_output.jsonl", batch.kept_s)
        batch.has_errors = self.files.adopt(batch.errors, f"{batch.id}_error.jsonl", batch.kept_s)


def _trouble(error: Exception) -> Trouble:
    """Why a batch could not go on, as a client may know it; the log has the whole of it."""
    if isinstance(error, ClosedError):
        return Trouble("server_error", str(error))
    log.error("a batch cannot go on: %s", error, exc_info=not isinstance(error, OffspecError))
    fault = of_error(error) if isinstance(error, OffspecError) else internal()
    return Trouble("server_error", fault.message)

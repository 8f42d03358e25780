"""Batches of clients, which run while the server is idle and continue after a restart.

The state of a batch is entirely in files: its description, its lines and its results so far. A server that
ends, even if it is killed, has nothing left to save, and the next server continues from these files.
"""

import asyncio
import hashlib
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

from offspec.core.file_lock import lock_for, release
from offspec.core.files import make_private_folder
from offspec.core.private_folders import data_root
from offspec.server.api_errors import ApiError, invalid
from offspec.server.batch.batch_runner import BatchRunner
from offspec.server.batch.record_store import RecordStore
from offspec.server.batch.stored_batch import StoredBatch
from offspec.server.batch.stored_files import KEPT_S, StoredFiles
from offspec.server.service import Service
from offspec.server.threads import run_in_thread

if TYPE_CHECKING:
    from filelock import BaseFileLock

log = logging.getLogger("offspec.server")

_MOST_UNFINISHED = 64


def batches_folder(name: str) -> Path:
    """Return the folder for files and batches of a model. name: name of the model."""
    readable = re.sub(r"[^\w.-]+", "-", name)[-80:].lstrip(".")
    return data_root() / "batches" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class BatchJobs:
    """Files and batches of one server, in a folder per model that only one server uses at a time.

    Call the methods in the event loop; they access the disk in threads. Descriptions and lists, which clients
    request most often, are read from memory.

    service: service that answers the lines.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._folder = service, batches_folder(service.names[-1])
        self.files = StoredFiles(self._folder)
        self.batches = RecordStore(self._folder, StoredBatch, "batch_", "batch")
        self.runner = BatchRunner(service, self.files, self.batches)
        self._held: BaseFileLock | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks = dict[str, asyncio.Task[None]]()
        self._changes = asyncio.Lock()  # held while a file or batch is added or removed

    def start(self) -> None:
        """Start resuming unfinished batches."""
        self._starting = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        try:
            if await run_in_thread(self._folder.exists):
                await self.open()
        except (ApiError, OSError) as error:
            log.warning("cannot resume batches: %s", error)

    async def close(self) -> None:
        """Stop all batches and release the folder for other servers."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._held is not None:
            await run_in_thread(release, self._held)
            self._held = None

    async def open(self) -> None:
        """Lock and read the folder, unless it is open already. Raises ApiError if that is impossible."""
        if self._held is not None:
            return
        async with self._changes:
            if self._held is None:
                self._held = await run_in_thread(self._lock_and_load)
                for batch in self.batches.all():
                    if batch.is_unfinished:
                        self._begin(batch)

    def _lock_and_load(self) -> "BaseFileLock":
        from filelock import Timeout

        try:
            make_private_folder(self._folder)
            lock = lock_for(self._folder)
            lock.acquire(timeout=0)
        except Timeout:
            message = "another server of this model uses the files and batches: send requests to it"
            raise ApiError("unavailable", message, retry_after=60) from None
        except OSError as error:
            log.error("cannot store files in %s: %s; set OFFSPEC_DATA to another folder", self._folder, error)
            raise ApiError("server", "cannot store files: see the server's log") from None
        self.batches.load()
        self.files.open(self._needed())
        self._remove(*self._expired())
        return lock

    async def expire(self) -> None:
        """Remove expired files and batches."""
        if any(self._expired()):
            async with self._changes:
                await run_in_thread(self._remove, *self._expired())

    def _expired(self) -> tuple[list[str], list[str]]:
        """Return the ids of expired files and of expired batches."""
        ended = [batch for batch in self.batches.all() if not batch.is_unfinished]
        expired = [batch.id for batch in ended if batch.ended_at + KEPT_S < time.time()]
        return self.files.expired(self._needed()), expired

    def _remove(self, files: list[str], batches: list[str]) -> None:
        for id in files:
            self.files.remove(id)
        for id in batches:
            self.batches.remove(id)

    async def remove_file(self, id: str) -> None:
        """Remove a file. Raises ApiError if it is unknown or an unfinished batch needs it."""
        async with self._changes:
            self.files.records.get(id)
            if id in self._needed():
                message = "an unfinished batch needs the file: cancel the batch first"
                raise ApiError("invalid_request", message)
            await run_in_thread(self.files.remove, id)

    async def create(
        self, input: str, endpoint: str, metadata: dict[str, str] | None, kept_s: int | None
    ) -> StoredBatch:
        """Start a batch with the lines of a file; see `StoredBatch` for the arguments. Raises ApiError."""
        async with self._changes:
            batch = self._new_batch(input, endpoint)
            batch.metadata, batch.kept_s = metadata, kept_s
            await run_in_thread(self.batches.save, batch)
            self._begin(batch)
        return batch

    def _new_batch(self, input: str, endpoint: str) -> StoredBatch:
        if self.files.records.get(input, "input_file_id").purpose != "batch":
            raise invalid("input_file_id", "the file's purpose must be batch")
        if sum(batch.is_unfinished for batch in self.batches.all()) >= _MOST_UNFINISHED:
            message = f"too many unfinished batches: the maximum is {_MOST_UNFINISHED}; wait for one to end"
            raise ApiError("rate_limit", message, retry_after=60)
        ids = self.files.records.new_id(), self.files.records.new_id()
        model, order = self._service.names[0], time.time_ns()
        return StoredBatch(self.batches.new_id(), order, model, endpoint, input, *ids)

    async def cancel(self, id: str) -> StoredBatch:
        """Start cancelling a batch. Raises ApiError if it is unknown or has ended."""
        batch = self.batches.get(id)
        if batch.status in ("validating", "in_progress"):
            if (task := self._tasks.get(id)) is not None:  # otherwise it failed and waits for a restart
                task.cancel()
            await self.runner.set_status(batch, "cancelling")
        elif batch.status != "cancelling":
            raise ApiError("invalid_request", f"the batch cannot be cancelled: it is {batch.status}")
        return batch

    def _needed(self) -> set[str]:
        """Return the ids of the files of unfinished batches."""
        unfinished = [batch for batch in self.batches.all() if batch.is_unfinished]
        return {id for batch in unfinished for id in (batch.input, batch.output, batch.errors)}

    def _begin(self, batch: StoredBatch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self.runner.run(batch))

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[batch.id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s is stopped until the server is restarted: %s", batch.id, error)

        task.add_done_callback(ended)

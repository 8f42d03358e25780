"""Batches that clients have asked for: they are answered while nobody else asks, through any restart.

A batch is what its files say: its description, its lines, and what was answered already. So there is nothing
to be saved when a server ends, however it ends, and the next one goes on from there.
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
    """The folder in which a server that answers by a name keeps files and batches."""
    readable = re.sub(r"[^\w.-]+", "-", name)[-80:].lstrip(".")
    return data_root() / "batches" / f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class BatchJobs:
    """Files and batches of one server.

    Methods are called on the event loop, and use the disk in threads. What clients ask for most often, a
    description or a list, is read from memory.

    They are in a folder for the model's own name, which one server at a time has. service: answers.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._folder = service, batches_folder(service.names[-1])
        self.files = StoredFiles(self._folder)
        self.batches = RecordStore(self._folder, StoredBatch, "batch_", "batch")
        self.runner = BatchRunner(service, self.files, self.batches)
        self._held: BaseFileLock | None = None
        self._starting: asyncio.Task[None] | None = None
        self._tasks = dict[str, asyncio.Task[None]]()
        self._changes = asyncio.Lock()  # held while files and batches are added or removed

    def start(self) -> None:
        """Begin to resume what is not finished."""
        self._starting = asyncio.create_task(self._resume())

    async def _resume(self) -> None:
        try:
            if await run_in_thread(self._folder.exists):
                await self.open()
        except (ApiError, OSError) as error:
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
            await run_in_thread(release, self._held)
            self._held = None

    async def open(self) -> None:
        """Lock the folder and read it, unless this server has done so. Raises Fault if that is impossible."""
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
            message = "another server of this model has the files and batches: ask that one"
            raise ApiError("unavailable", message, retry_after=60) from None
        except OSError as error:
            log.error(
                "files cannot be kept in %s: %s; set OFFSPEC_DATA to another folder", *(self._folder, error)
            )
            raise ApiError("server", "files cannot be kept here; the server's log says why") from None
        self.batches.load()
        self.files.open(self._needed())
        self._remove(*self._expired())
        return lock

    async def expire(self) -> None:
        """Remove files and batches whose time is over."""
        if any(self._expired()):
            async with self._changes:
                await run_in_thread(self._remove, *self._expired())

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
                raise ApiError("invalid_request", message)
            await run_in_thread(self.files.remove, id)

    async def create(
        self, input: str, endpoint: str, metadata: dict[str, str] | None, kept_s: int | None
    ) -> StoredBatch:
        """Begin a batch of the lines of a file; see StoredBatch. Raises Fault."""
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
            message = f"{_MOST_UNFINISHED} batches are not finished yet, and no more may wait"
            raise ApiError("rate_limit", message, retry_after=60)
        ids = self.files.records.new_id(), self.files.records.new_id()
        model, order = self._service.names[0], time.time_ns()
        return StoredBatch(self.batches.new_id(), order, model, endpoint, input, *ids)

    async def cancel(self, id: str) -> StoredBatch:
        """Begin to break a batch off. Raises Fault where it is too late."""
        batch = self.batches.get(id)
        if batch.status in ("validating", "in_progress"):
            if (task := self._tasks.get(id)) is not None:  # else it failed, and waits for a restart
                task.cancel()
            await self.runner.set_status(batch, "cancelling")
        elif batch.status != "cancelling":
            raise ApiError("invalid_request", f"the batch cannot be cancelled: it is {batch.status}")
        return batch

    def _needed(self) -> set[str]:
        """Ids of files of unfinished batches."""
        unfinished = [batch for batch in self.batches.all() if batch.is_unfinished]
        return {id for batch in unfinished for id in (batch.input, batch.output, batch.errors)}

    def _begin(self, batch: StoredBatch) -> None:
        task = self._tasks[batch.id] = asyncio.create_task(self.runner.run(batch))

        def ended(task: asyncio.Task[None]) -> None:
            del self._tasks[batch.id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s cannot go on before the server is restarted: %s", batch.id, error)

        task.add_done_callback(ended)

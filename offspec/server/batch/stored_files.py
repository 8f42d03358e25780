"""Files that clients have uploaded, and results of batches, kept on disk for a while."""

import shutil
import threading
import time
from collections.abc import Container
from pathlib import Path
from typing import Any, BinaryIO, Literal

from msgspec import Struct
from msgspec.structs import asdict

from offspec.core.files import atomic_file
from offspec.server.api_errors import ApiError
from offspec.server.batch.record_store import PRIVATE, RecordStore
from offspec_planners.units import format_bytes

KEPT_S = 30 * 86400  # that a file is kept for, where the client does not say
_BUFFER = 2**20

Purpose = Literal["batch", "batch_output"]


class StoredFile(Struct):
    """Description of a file. bytes: its size; created_at, expires_at: in seconds since 1970."""

    id: str
    order: int
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose

    def to_openai(self) -> dict[str, Any]:
        """The file as OpenAI's object."""
        fields = asdict(self)
        del fields["order"]
        return {"id": self.id, "object": "file", **fields, "status": "processed", "status_details": None}


class StoredFiles:
    """Files of one folder, each with its description.

    folder: where they are.
    """

    most_bytes = 2**30  # that all of them may take for another to be taken

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records = RecordStore(folder, StoredFile, "file-", "file")
        self._adding = threading.Lock()  # one file after the other, so that each counts for the next

    def open(self, needed: Container[str]) -> None:
        """Find what there is; what was being written when a server was killed is removed.

        needed: ids of files that must stay: a batch that is not finished has them.
        """
        self.records.load()
        known = {file.id for file in self.records.all()}
        for path in [*self._folder.glob("file-*.jsonl"), *self._folder.glob(".*.partial")]:
            if path.stem not in known and path.stem not in needed:
                path.unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """The path of the file with an id, whether it exists or not."""
        return self._folder / f"{id}.jsonl"

    def add(self, source: BinaryIO, filename: str, seconds: int | None) -> StoredFile:
        """Keep a file for some seconds. Raises Fault where it is empty or there is no room, DiskFullError."""
        size = source.seek(0, 2)
        source.seek(0)
        if not size:
            raise ApiError("invalid_request", "the file is empty", field="file", code="empty_file")
        with self._adding:
            self._check_room(size)
            id = self.records.new_id()
            with atomic_file(self.path(id), size, PRIVATE) as fd, open(fd, "wb", closefd=False) as copy:
                shutil.copyfileobj(source, copy, _BUFFER)
            return self._describe(id, filename[:255], "batch", seconds)

    def register(self, id: str, filename: str, seconds: int | None) -> bool:
        """Describe a file that was written where `path` says, so that clients see it; one without text goes.

        Returns whether there is one.
        """
        path = self.path(id)
        if not path.exists() or not path.stat().st_size:
            path.unlink(missing_ok=True)
            return False
        self._describe(id, filename, "batch_output", seconds)
        return True

    def remove(self, id: str) -> None:
        """Remove a file and its description."""
        self.records.remove(id)
        self.path(id).unlink(missing_ok=True)

    def expired(self, needed: Container[str]) -> list[str]:
        """Ids of files whose time is over, without those that are needed."""
        over = [file.id for file in self.records.all() if file.expires_at < time.time()]
        return [id for id in over if id not in needed]

    def _check_room(self, size: int) -> None:
        taken = sum(file.bytes for file in self.records.all())
        if taken + size > self.most_bytes:
            raise ApiError(
                "too_large",
                f"the files that are kept here take {format_bytes(taken)}, and may take "
                f"{format_bytes(self.most_bytes)} in all: delete some",
                code="storage_full",
            )

    def _describe(self, id: str, filename: str, purpose: Purpose, seconds: int | None) -> StoredFile:
        now, size = time.time(), self.path(id).stat().st_size
        until = int(now) + (KEPT_S if seconds is None else seconds)
        file = StoredFile(id, time.time_ns(), size, int(now), until, filename, purpose)
        self.records.save(file)
        return file

"""Uploaded files and results of batches, on disk until they expire."""

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

KEPT_S = 30 * 86400  # default lifetime of a file
_BUFFER = 2**20

Purpose = Literal["batch", "batch_output"]


class StoredFile(Struct):
    """Description of a file.

    order: creation time, in nanoseconds since 1970. bytes: size of the file. created_at, expires_at: in
    seconds since 1970.
    """

    id: str
    order: int
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose

    def to_openai(self) -> dict[str, Any]:
        """Return the file as an object of OpenAI's API."""
        fields = asdict(self)
        del fields["order"]
        return {"id": self.id, "object": "file", **fields, "status": "processed", "status_details": None}


class StoredFiles:
    """Files in one folder, each with its description. folder: path of the folder."""

    most_bytes = 2**30  # maximum total size of all files, including a new one

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.records = RecordStore(folder, StoredFile, "file-", "file")
        self._adding = threading.Lock()  # files are added one at a time, so that the limit holds

    def open(self, needed: Container[str]) -> None:
        """Read the descriptions, and remove files without one, left by a killed server.

        needed: ids of files to keep without a description, because an unfinished batch uses them.
        """
        self.records.load()
        known = {file.id for file in self.records.all()}
        for path in [*self._folder.glob("file-*.jsonl"), *self._folder.glob(".*.partial")]:
            if path.stem not in known and path.stem not in needed:
                path.unlink(missing_ok=True)

    def path(self, id: str) -> Path:
        """Return the path of the file with an id, whether it exists or not."""
        return self._folder / f"{id}.jsonl"

    def add(self, source: BinaryIO, filename: str, seconds: int | None) -> StoredFile:
        """Store a copy of a file. Raises ApiError if it is empty or exceeds the limit, and DiskFullError.

        Args:
            source: Open file.
            filename: Name for clients.
            seconds: Lifetime of the copy. None: the default.
        """
        size = source.seek(0, 2)
        source.seek(0)
        if not size:
            raise ApiError("invalid_request", "the file is empty", field="file", code="empty_file")
        with self._adding:
            self._check_limit(size)
            id = self.records.new_id()
            with atomic_file(self.path(id), size, PRIVATE) as fd, open(fd, "wb", closefd=False) as copy:
                shutil.copyfileobj(source, copy, _BUFFER)
            return self._describe(id, filename[:255], "batch", seconds)

    def register(self, id: str, filename: str, seconds: int | None) -> bool:
        """Describe a file that was written to `path(id)`, so that clients see it; an empty file is removed.

        Return whether the file exists.
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
        """Return the ids of expired files, except those in `needed`."""
        expired = [file.id for file in self.records.all() if file.expires_at < time.time()]
        return [id for id in expired if id not in needed]

    def _check_limit(self, size: int) -> None:
        used = sum(file.bytes for file in self.records.all())
        if used + size > self.most_bytes:
            raise ApiError(
                "too_large",
                f"the file does not fit: stored files use {format_bytes(used)} of "
                f"{format_bytes(self.most_bytes)}; delete some",
                code="storage_full",
            )

    def _describe(self, id: str, filename: str, purpose: Purpose, seconds: int | None) -> StoredFile:
        now, size = time.time(), self.path(id).stat().st_size
        until = int(now) + (KEPT_S if seconds is None else seconds)
        file = StoredFile(id, time.time_ns(), size, int(now), until, filename, purpose)
        self.records.save(file)
        return file

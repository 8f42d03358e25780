"""Conversations of the Responses API, kept on disk for a while, so that requests can go on from them."""

import math
import os
import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offspec.core.files import private_folder, write_file

_ID = re.compile(r"resp_[0-9a-f]{32}")
_PRIVATE = 0o600
_RESCAN_S = 600.0  # after which files of other servers are counted again


def fresh_id() -> str:
    """An id that no response has, and nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


class _File(NamedTuple):
    """When a file was written, in seconds since 1970, and its size in bytes."""

    written: float
    size: int


class Stored(msgspec.Struct):
    """A response as the client got it, and all items up to its end: those of earlier ones, input, output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class StoredResponses:
    """Responses on disk, one file each. Methods may be called from any thread.

    Args:
        folder: Folder of the files; created with the first response, unreadable for other users.
        seconds: Time for which a response is kept.
        most_bytes: Limit for all files together; the oldest are removed first.
    """

    def __init__(self, folder: Path, *, seconds: float = 7 * 86400, most_bytes: int = 2**28) -> None:
        self._folder, self._seconds, self._most = folder, seconds, most_bytes
        self._lock = threading.Lock()
        self._files = dict[Path, _File]()  # the oldest first
        self._bytes = 0  # of all of them
        self._scanned = -math.inf

    def keep(self, stored: Stored) -> None:
        """Write a response, and remove those that are too old or too many. Raises OSError, OffspecError."""
        data = msgspec.json.encode(stored)
        path = self._folder / f"{stored.response['id']}.json"
        with self._lock:
            private_folder(self._folder)
            if time.monotonic() - self._scanned > _RESCAN_S:
                self._scan()
            self._make_room(len(data))
            if len(data) <= self._most:
                write_file(path, data, _PRIVATE)
                self._add(path, _File(time.time(), len(data)))

    def get(self, id: str) -> Stored | None:
        """A response that is still kept."""
        path = self._path(id)
        try:
            if path is None or self._is_old(path.stat().st_mtime):
                return None
            return msgspec.json.decode(path.read_bytes(), type=Stored)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # removed meanwhile, or damaged
            return None

    def remove(self, id: str) -> bool:
        """Remove a response. Return whether it was kept until now."""
        found = self.get(id) is not None
        if path := self._path(id):
            with self._lock:
                self._remove(path)
        return found

    def _path(self, id: str) -> Path | None:
        return self._folder / f"{id}.json" if _ID.fullmatch(id) else None

    def _is_old(self, written: float) -> bool:
        return time.time() - written > self._seconds

    def _scan(self) -> None:
        """Read sizes and ages from the folder, to which other servers of this user write as well."""
        found = dict[Path, _File]()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith("resp_") and entry.name.endswith(".json"):
                    with suppress(OSError):  # another server has removed it
                        stat = entry.stat()
                        found[self._folder / entry.name] = _File(stat.st_mtime, stat.st_size)
        self._files, self._bytes = {}, 0
        for path, file in sorted(found.items(), key=lambda item: item[1].written):
            self._add(path, file)
        self._scanned = time.monotonic()

    def _make_room(self, size: int) -> None:
        """Remove the oldest files until no file is too old and `size` more bytes fit."""
        while self._files:
            path = next(iter(self._files))
            if self._bytes + size <= self._most and not self._is_old(self._files[path].written):
                break
            self._remove(path)

    def _add(self, path: Path, file: _File) -> None:
        self._files[path] = file
        self._bytes += file.size

    def _remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if (file := self._files.pop(path, None)) is not None:
            self._bytes -= file.size

"""Conversations of the Responses API, kept on disk for a while, so that requests can go on from them."""

import re
import secrets
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from offspec.core.files import private_folder, write_file

_ID = re.compile(r"resp_[0-9a-f]{32}")
_PRIVATE = 0o600


def fresh_id() -> str:
    """An id that no response has, and nobody can guess."""
    return f"resp_{secrets.token_hex(16)}"


class Stored(msgspec.Struct):
    """A response as the client got it, and all items up to its end: those of earlier ones, input, output."""

    response: dict[str, Any]
    items: list[dict[str, Any]]


class StoredResponses:
    """One file a response. Methods may be called from any thread.

    Args:
        folder: Where they are; made when the first is kept, unreadable for other users.
        seconds: For which a response is kept.
        most_bytes: That all of them may take; the oldest go first.
    """

    def __init__(self, folder: Path, *, seconds: float = 7 * 86400, most_bytes: int = 2**28) -> None:
        self._folder, self._seconds, self._most = folder, seconds, most_bytes
        self._turns = threading.Lock()

    def keep(self, stored: Stored) -> None:
        """Write a response, and remove those that are too old or too many. Raises OSError, OffspecError."""
        data = msgspec.json.encode(stored)
        with self._turns:
            private_folder(self._folder)
            self._make_room(len(data))
            if len(data) <= self._most:
                write_file(self._folder / f"{stored.response['id']}.json", data, _PRIVATE)

    def get(self, id: str) -> Stored | None:
        """A response that is still kept."""
        path = self._path(id)
        try:
            if path is None or self._is_old(path):
                return None
            return msgspec.json.decode(path.read_bytes(), type=Stored)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):  # gone meanwhile, or damaged
            return None

    def remove(self, id: str) -> bool:
        """Whether there was such a response; there is none now."""
        found = self.get(id) is not None
        if path := self._path(id):
            path.unlink(missing_ok=True)
        return found

    def _path(self, id: str) -> Path | None:
        return self._folder / f"{id}.json" if _ID.fullmatch(id) else None

    def _is_old(self, path: Path) -> bool:
        return time.time() - path.stat().st_mtime > self._seconds

    def _make_room(self, size: int) -> None:
        kept = list[tuple[float, int, Path]]()
        for path in self._folder.glob("resp_*.json"):
            with suppress(OSError):  # another server of this user has removed it
                if self._is_old(path):
                    path.unlink()
                else:
                    kept.append((path.stat().st_mtime, path.stat().st_size, path))
        size += sum(taken for _, taken, _ in kept)
        for _, taken, path in sorted(kept):
            if size <= self._most:
                break
            path.unlink(missing_ok=True)
            size -= taken

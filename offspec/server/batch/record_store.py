"""Descriptions of what is kept, each in a small file of JSON, and all in memory."""

import logging
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from offspec.core.files import write_atomic
from offspec.server.api_errors import ApiError
from offspec.server.reply import list_page

log = logging.getLogger("offspec.server")

PRIVATE = 0o600


class Record(Protocol):
    """order: of its making, in nanoseconds since 1970."""

    id: str
    order: int

    def to_openai(self) -> dict[str, Any]:
        """The record as OpenAI's object."""


R = TypeVar("R", bound=Record)


class RecordStore(Generic[R]):
    """Descriptions of one kind. `load`, `save` and `remove` use the disk; the others only read memory.

    Args:
        folder: Where they are.
        kind: Their Struct.
        prefix: What ids begin with; the files are named by ids.
        called: What errors call one.
    """

    def __init__(self, folder: Path, kind: type[R], prefix: str, called: str) -> None:
        self._folder, self._kind, self._prefix, self._called = folder, kind, prefix, called
        self._all = dict[str, R]()
        self._writing = threading.Lock()  # so that the last to save a record saves its last state

    def load(self) -> None:
        """Read all of them; a damaged one is left out, and the log says so."""
        for path in self._folder.glob(f"{self._prefix}*.json"):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=self._kind)
            except (OSError, ValueError) as error:
                log.warning("%s is damaged, and left out: %s", path, error)
            else:
                self._all[record.id] = record

    def new_id(self) -> str:
        """An id that no other has, and nobody can guess."""
        return f"{self._prefix}{secrets.token_hex(16)}"

    def save(self, record: R) -> None:
        """Keep a record, or what has changed of it, durably. Raises OSError, DiskFullError."""
        with self._writing:
            write_atomic(self._path(record.id), msgspec.json.encode(record), PRIVATE)
            self._all[record.id] = record

    def remove(self, id: str) -> None:
        """Forget a record."""
        with self._writing:
            self._path(id).unlink(missing_ok=True)
            self._all.pop(id, None)

    def get(self, id: str, field: str | None = None) -> R:
        """The record of an id. Raises Fault where there is none. field: of the request that names it."""
        if (record := self._all.get(id)) is None:
            raise ApiError("not_found", f"there is no {self._called} {id[:100]!r}", field=field)
        return record

    def all(self) -> list[R]:
        """All of them, the oldest first."""
        records = list(self._all.values())  # at once: threads add and remove some
        return sorted(records, key=lambda record: record.order)

    def page(
        self,
        *,
        after: str | None,
        limit: int,
        ascending: bool = False,
        wanted: Callable[[R], bool] = lambda record: True,
    ) -> dict[str, Any]:
        """A list in OpenAI's shape, the newest first unless `ascending`. Raises Fault for a wrong `after`.

        Args:
            after: The id before the first; None: from the beginning.
            limit: How many at most.
            ascending: The oldest first.
            wanted: Which.
        """
        found = [record for record in self.all() if wanted(record)]
        if not ascending:
            found.reverse()
        if after is not None:
            order = self.get(after, "after").order
            found = [record for record in found if (record.order > order) == ascending and record.id != after]
        return list_page([record.to_openai() for record in found[:limit]], len(found) > limit)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

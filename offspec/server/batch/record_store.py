"""Store of records, each in a small JSON file, with all of them in memory."""

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
    """Description of a stored file or batch. order: creation time, in nanoseconds since 1970."""

    id: str
    order: int

    def to_openai(self) -> dict[str, Any]:
        """Return the record as an object of OpenAI's API."""


R = TypeVar("R", bound=Record)


class RecordStore(Generic[R]):
    """Records of one kind. `load`, `save` and `remove` access the disk; the other methods only read memory.

    Args:
        folder: Folder of the JSON files, which are named by id.
        kind: Struct of the records.
        prefix: Prefix of their ids.
        called: Name of such a record in error messages.
    """

    def __init__(self, folder: Path, kind: type[R], prefix: str, called: str) -> None:
        self._folder, self._kind, self._prefix, self._called = folder, kind, prefix, called
        self._all = dict[str, R]()
        self._writing = threading.Lock()  # the last save of a record must write its last state

    def load(self) -> None:
        """Read all records. Damaged files are skipped with a warning in the log."""
        for path in self._folder.glob(f"{self._prefix}*.json"):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=self._kind)
            except (OSError, ValueError) as error:
                log.warning("%s is damaged and was skipped: %s", path, error)
            else:
                self._all[record.id] = record

    def new_id(self) -> str:
        """Return a new, unguessable id."""
        return f"{self._prefix}{secrets.token_hex(16)}"

    def save(self, record: R) -> None:
        """Write a new or changed record durably. Raises OSError, DiskFullError."""
        with self._writing:
            write_atomic(self._path(record.id), msgspec.json.encode(record), PRIVATE)
            self._all[record.id] = record

    def remove(self, id: str) -> None:
        """Remove a record."""
        with self._writing:
            self._path(id).unlink(missing_ok=True)
            self._all.pop(id, None)

    def get(self, id: str, field: str | None = None) -> R:
        """Return a record by id. Raises ApiError if there is none. field: name of the request's field."""
        if (record := self._all.get(id)) is None:
            raise ApiError("not_found", f"there is no {self._called} {id[:100]!r}", field=field)
        return record

    def all(self) -> list[R]:
        """Return all records, the oldest first."""
        records = list(self._all.values())  # copied first: other threads add and remove records
        return sorted(records, key=lambda record: record.order)

    def page(
        self,
        *,
        after: str | None,
        limit: int,
        ascending: bool = False,
        wanted: Callable[[R], bool] = lambda record: True,
    ) -> dict[str, Any]:
        """Return a page of records in OpenAI's format. Raises ApiError if `after` is unknown.

        Args:
            after: Id of the record before the page. None: the page is the first.
            limit: Maximum number of records.
            ascending: Whether the oldest record is first; by default the newest is.
            wanted: Filter of records.
        """
        records = [record for record in self.all() if wanted(record)]
        if not ascending:
            records.reverse()
        if after is not None:
            order = self.get(after, "after").order
            records = [each for each in records if (each.order > order) == ascending and each.id != after]
        return list_page([record.to_openai() for record in records[:limit]], len(records) > limit)

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}.json"

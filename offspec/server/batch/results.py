"""The file that answers are added to, each line whole and on disk before the next; later a Parquet file."""

import fcntl
import json
import os
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from offspec.core.errors import RequestError, missing_package
from offspec.core.files import as_disk_full_error, as_read_error, atomic_file, write_all


class ResultFile:
    """Results of a batch, which one process at a time adds to, from any thread; a context manager.

    `done` has the ids of all results, those of earlier runs included, and `failed` the ids of those that are
    errors. An incomplete last line, left by a run that was killed, is removed.

    Args:
        path: Of the file; it is made where there is none.
        mode: Its permissions then, less what the user's mask takes away.

    Raises:
        RequestError: It cannot be written, is being written by another process, or has other lines.
    """

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self.path = path
        self.done, self.failed = set[str](), set[str]()
        self._turns = threading.Lock()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, mode)
        except OSError as error:
            raise RequestError(f"cannot write to {path}: {error.strerror}; name another file") from error
        try:
            self._lock()
            self._resume()
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RequestError(
                f"another process is writing to {self.path}: wait for it, or name another file"
            ) from error

    def _resume(self) -> None:
        """Read the finished ids, and cut off anything after the last complete line."""
        whole = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                whole += len(text)
                if text.strip():
                    self._note(*self._read(number, text))
        os.ftruncate(self._fd, whole)

    def _read(self, number: int, text: bytes) -> tuple[str, dict[str, Any]]:
        try:
            fields = json.loads(text)
            return str(fields["custom_id"] if "custom_id" in fields else fields["id"]), fields
        except (ValueError, TypeError, KeyError):
            raise RequestError(
                f"line {number} of {self.path} is no result of a batch: name another file for the results"
            ) from None

    def _note(self, name: str, result: dict[str, Any]) -> None:
        self.done.add(name)
        response = result.get("response")
        status = response.get("status_code") if isinstance(response, dict) else 200
        if result.get("error") is not None or status != 200:
            self.failed.add(name)

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Add one more result, durably. Raises DiskFullError; the line is then not there."""
        text = json.dumps(result, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with self._turns:
            size = os.fstat(self._fd).st_size
            try:
                with as_disk_full_error(self.path):
                    write_all(self._fd, memoryview(text))
                    os.fsync(self._fd)
            except BaseException:
                os.ftruncate(self._fd, size)
                raise
            self._note(name, result)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._turns:
            os.close(self._fd)
            self._fd = -1  # what comes too late must not reach another file that has its number


def check_parquet_installed() -> None:
    """Raises RequestError where no Parquet file could be written."""
    if find_spec("pyarrow") is None:
        raise RequestError(f"{missing_package('pyarrow', 'ray')}; or name a .jsonl file")


def write_parquet(results: Path, out: Path) -> None:
    """Write what a file of results has, a column for each field. Objects and lists become JSON as text.

    results: of `ResultFile`. out: replaced whole where there is one.

    Raises:
        CheckpointError: The results cannot be read.
        DiskFullError: There is no room.
    """
    import pyarrow
    from pyarrow import parquet

    with as_read_error(results), results.open("rb") as lines:
        rows = [json.loads(line) for line in lines]
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [_cell(row.get(name)) for row in rows] for name in names}
    with atomic_file(out) as fd, open(fd, "wb", closefd=False) as file:
        parquet.write_table(pyarrow.table(columns), file)


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value

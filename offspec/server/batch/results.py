"""Result file, to which each line is written durably before the next, and its conversion to Parquet."""

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
    """Result file of a batch, and context manager that closes it.

    Only one process at a time can write to the file; its threads may share the object. `done` contains the
    ids of all results, including those of earlier runs, and `failed` the ids of errors. An incomplete last
    line, left by a killed run, is removed.

    Args:
        path: Path of the file, which is created if it does not exist.
        mode: Permissions of a new file, restricted by the umask.

    Raises:
        RequestError: The file cannot be written, is in use by another process, or has lines of another kind.
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
        """Read the ids of all results, and truncate the file after the last complete line."""
        size = 0
        with open(os.dup(self._fd), "rb") as file:
            file.seek(0)
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                size += len(text)
                if text.strip():
                    self._note(*self._read(number, text))
        os.ftruncate(self._fd, size)

    def _read(self, number: int, text: bytes) -> tuple[str, dict[str, Any]]:
        try:
            fields = json.loads(text)
            return str(fields["custom_id"] if "custom_id" in fields else fields["id"]), fields
        except (ValueError, TypeError, KeyError):
            raise RequestError(
                f"line {number} of {self.path} is not a batch result: name another file for the results"
            ) from None

    def _note(self, name: str, result: dict[str, Any]) -> None:
        self.done.add(name)
        response = result.get("response")
        status = response.get("status_code") if isinstance(response, dict) else 200
        if result.get("error") is not None or status != 200:
            self.failed.add(name)

    def add(self, name: str, result: dict[str, Any]) -> None:
        """Append a result durably. Raises DiskFullError, without adding a part of the line."""
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
            self._fd = -1  # a late write must not reach another file with the same descriptor


def check_parquet_installed() -> None:
    """Raise RequestError if pyarrow, which writes Parquet files, is not installed."""
    if find_spec("pyarrow") is None:
        raise RequestError(f"{missing_package('pyarrow', 'ray')}; or name a .jsonl file")


def write_parquet(results: Path, out: Path) -> None:
    """Convert a result file to Parquet, with one column per field. Objects and lists become JSON text.

    Args:
        results: Path of a `ResultFile`.
        out: Path of the Parquet file, which is replaced atomically if it exists.

    Raises:
        CheckpointError: The results cannot be read.
        DiskFullError: The disk is full.
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

"""Atomic file writes, and typed errors for full disks and failed reads."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, NamedTuple

from offspec.core.errors import CheckpointError, DiskFullError
from offspec_planners.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOTSUP)

_unfinished: set[Path] = set()
"""Files and folders of this process that will soon be renamed or removed."""


def require_space(folder: Path, needed: int, purpose: str, variable: str = "OFFSPEC_CACHE") -> None:
    """Raise DiskFullError unless `needed` bytes are free at `folder`, which need not exist yet.

    purpose: subject of the message. variable: environment variable that the message suggests for another
    folder.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskFullError(
            f"{purpose} needs {format_bytes(needed)} in {folder}, but only {format_bytes(free)} are free: "
            f"free some space, or set {variable} to a folder on a larger disk"
        )


@contextmanager
def as_disk_full_error(place: Path, needed: int | None = None) -> Iterator[None]:
    """Turn "no space left" or "quota exceeded" inside the block into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        size = f" ({format_bytes(needed)} needed)" if needed else ""
        raise DiskFullError(f"the disk is full: cannot write {place}{size}; free some space") from error


@contextmanager
def as_read_error(place: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError that names the unreadable file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {place}: {error.strerror or error}") from error


class FileStamp(NamedTuple):
    """Identity stamp of an open file, which changes if the file is replaced or modified."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """Return the stamp of an open file descriptor."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_regular(path: Path | str, flags: int = 0) -> int:
    """Open a regular file for reading and return its descriptor. flags: further flags of `os.open`.

    Raises OSError for anything else: opening a pipe would block, and a device may have no end.
    """
    _refuse_special(os.stat(path).st_mode)  # before opening, which may have effects on a device
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        _refuse_special(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_special(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file, but a pipe or a device")


@contextmanager
def open_to_read(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading bytes. An OSError inside the block becomes a CheckpointError."""
    with as_read_error(path), open(open_regular(path), "rb") as file:
        yield file


@contextmanager
def as_write_error(folder: Path, fix: str) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError that names the folder and the `fix`."""
    try:
        yield
    except BrokenPipeError:  # from a progress listener: files do not raise it
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder} ({error.strerror or error}): {fix}") from error


def partial_name(path: Path) -> Path:
    """Return a new hidden name next to `path`, for a file to be written and then renamed to `path`."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


@contextmanager
def removed_on_exit(path: Path) -> Iterator[None]:
    """Have `remove_partial_files` remove a file or folder if the process exits inside the block."""
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


def remove_partial_files() -> None:
    """Delete temporary files and folders before a hard exit. Never raises."""
    for path in list(_unfinished):
        with suppress(OSError):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a folder that is deleted when the block ends."""
    with TemporaryDirectory(prefix="offspec-") as name, removed_on_exit(Path(name)):
        yield Path(name)


def reserve(fd: int, size: int) -> None:
    """Allocate all blocks of a file at once, to detect a full disk early and to get large extents."""
    if size and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise


def write_all(fd: int, data: memoryview) -> None:
    """Write every byte of `data` (format B) at the descriptor's position."""
    while data:
        data = data[os.write(fd, data) :]


def make_private_folder(folder: Path) -> None:
    """Create a folder, if it does not exist, that other users cannot read. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def real_path(path: Path) -> Path:
    """Return a path with symbolic links resolved, so that all names of a file are equal."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # ignored here; the first use of the path raises it
        return path


def probe_writable(path: Path) -> None:
    """Raise OSError unless a file can be created in the folder of `path`."""
    partial = partial_name(path)
    partial.touch(exist_ok=False)
    partial.unlink()


@contextmanager
def atomic_file(path: Path, size: int | None = None, mode: int = 0o666) -> Iterator[int]:
    """Yield the descriptor of a temporary file that durably replaces `path` when the block succeeds.

    After an error the temporary file is removed. Raises DiskFullError.

    Args:
        path: File to create or replace.
        size: Its size in bytes, for the error.
        mode: Its permissions, before the umask is applied.
    """
    partial = partial_name(path)
    with removed_on_exit(partial):
        try:
            with as_disk_full_error(path, size):
                fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                try:
                    yield fd
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def write_atomic(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file atomically with `atomic_file`."""
    with atomic_file(path, len(data), mode) as fd:
        write_all(fd, memoryview(data))


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is durably renamed to `folder` when the block succeeds.

    After an error the temporary folder is removed. Raises DiskFullError.
    """
    partial = partial_name(folder)
    with removed_on_exit(partial):
        try:
            with as_disk_full_error(folder):
                partial.mkdir()
                yield partial
                for file in partial.iterdir():
                    _sync(file)
                sync_folder(partial)
                os.rename(partial, folder)
                sync_folder(folder.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, if the platform supports it."""
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""Writing so that a file is whole or absent, and a full disk is one clear error."""

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
"""Files and folders of this process that are to have another name, or none, soon."""


def require_space(folder: Path, needed: int, purpose: str, variable: str = "OFFSPEC_CACHE") -> None:
    """Raise DiskFullError unless `needed` bytes are free where `folder` is or will be.

    The message says what the room is for, and which environment variable names another folder.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DiskFullError(
            f"{purpose} needs {format_bytes(needed)} in {folder}, where {format_bytes(free)} are free: "
            f"make room there, or set {variable} to a folder on a larger disk"
        )


@contextmanager
def disk_full(place: Path, needed: int | None = None) -> Iterator[None]:
    """Turn "no space left" (or a spent quota) inside the block into DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        size = f" ({format_bytes(needed)} needed)" if needed else ""
        raise DiskFullError(f"the disk filled up while writing {place}{size}: make room there") from error


@contextmanager
def reading(place: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError that says what cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {place}: {error.strerror or error}") from error


class FileStamp(NamedTuple):
    """What tells an open file from another, and from itself once it is written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileStamp:
        """That of an open file."""
        found = os.fstat(descriptor)
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def open_regular(path: Path | str, flags: int = 0) -> int:
    """The descriptor of a regular file, to read from; flags: more of `os.open`.

    A pipe would be waited for, and a device may have no end. Raises OSError.
    """
    _refuse_special(os.stat(path).st_mode)  # before it is opened: to open a device may do something
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
        raise OSError(errno.EINVAL, "it is a pipe or a device, and must be a regular file")


@contextmanager
def open_to_read(path: Path) -> Iterator[BinaryIO]:
    """A regular file, open to read bytes from. An OSError inside the block becomes a CheckpointError."""
    with reading(path), open(open_regular(path), "rb") as file:
        yield file


@contextmanager
def writing(folder: Path, fix: str) -> Iterator[None]:
    """Turn an OSError inside the block into a CheckpointError that says where, and how to `fix` it."""
    try:
        yield
    except BrokenPipeError:  # of a listener to progress: files have none
        raise
    except OSError as error:
        raise CheckpointError(f"cannot write to {folder} ({error.strerror or error}): {fix}") from error


def partial_name(path: Path) -> Path:
    """A fresh hidden sibling of `path`, to be written and then renamed onto it."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


@contextmanager
def unfinished(path: Path) -> Iterator[None]:
    """In the block there may be a file or folder that must not stay."""
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


def remove_unfinished() -> None:
    """Remove what only running code would, for a process that ends at once. Raises nothing."""
    for path in list(_unfinished):
        with suppress(OSError):
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A folder that is gone when the block has ended."""
    with TemporaryDirectory(prefix="offspec-") as name, unfinished(Path(name)):
        yield Path(name)


def reserve(fd: int, size: int) -> None:
    """Ask for all of a file's blocks at once: a full disk shows before the work, extents come whole."""
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


def private_folder(folder: Path) -> None:
    """Make a folder, where there is none, that other users cannot read. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def real_path(path: Path) -> Path:
    """Where a path leads to through links, so that all its names are one."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError):  # the first use of it reports the error
        return path


def probe(path: Path) -> None:
    """Raise OSError unless a file can be made beside `path`."""
    partial = partial_name(path)
    partial.touch(exist_ok=False)
    partial.unlink()


@contextmanager
def new_file(path: Path, size: int | None = None, mode: int = 0o666) -> Iterator[int]:
    """The descriptor of a file that takes the place of `path`, durable, when the block has ended well.

    After an error nothing is left of it. Raises DiskFullError.

    Args:
        path: where it goes.
        size: bytes it will have, for the error.
        mode: its permissions, less what the user's mask takes away.
    """
    partial = partial_name(path)
    with unfinished(partial):
        try:
            with disk_full(path, size):
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


def write_file(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a small file whole or not at all, as `new_file` does."""
    with new_file(path, len(data), mode) as fd:
        write_all(fd, memoryview(data))


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill with files, which is renamed to `folder`, durable, when the block has ended well.

    After an error nothing is left of it. Raises DiskFullError.
    """
    partial = partial_name(folder)
    with unfinished(partial):
        try:
            with disk_full(folder):
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
    """Make the names in a folder durable, where the platform can."""
    with suppress(OSError):
        _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

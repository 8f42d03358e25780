"""Checksums of files of weights: a quick one for bytes that are read anyway, and a thorough one."""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from offspec.core.errors import MissingTensorError
from offspec.core.files import open_regular
from offspec_planners.json_fields import Whole

_PIECE = 4 * 2**20

Printable = Annotated[str, Meta(pattern=r"^[ -~]*\Z", description="text that prints")]


@dataclass(frozen=True, slots=True)
class FileSum:
    """What the bytes of a safetensors file must be.

    size: bytes of the file; start: where its data begins, behind the header; crc32: of the data, from `start`
    to the end, which are in memory when a layer was streamed; blake2b: of the whole file, in hexadecimal.
    """

    size: Whole
    start: Whole
    crc32: Whole
    blake2b: Printable


class Summing:
    """Sums up a file that comes in order, in buffers of any size, and whose data begins at `start`."""

    def __init__(self, start: int) -> None:
        self._start, self._size, self._crc32 = start, 0, 0
        self._blake2b = hashlib.blake2b(digest_size=32)

    def add(self, buffer: memoryview) -> None:
        """The next bytes."""
        self._crc32 = zlib.crc32(buffer[max(0, self._start - self._size) :], self._crc32)
        self._blake2b.update(buffer)
        self._size += len(buffer)

    def result(self) -> FileSum:
        return FileSum(self._size, self._start, self._crc32, self._blake2b.hexdigest())


def stamp(file: Path) -> bytes:
    """A file's size and time, by which a change shows unread. Raises MissingTensorError."""
    try:
        stat = file.stat()
    except OSError as error:
        raise MissingTensorError(f"{file} is gone: {error.strerror or error}") from error
    return repr((stat.st_size, stat.st_mtime_ns)).encode()


def sum_of(data: bytes) -> FileSum:
    """That of a file with these bytes and no header."""
    seen = Summing(0)
    seen.add(memoryview(data))
    return seen.result()


def damage(
    path: Path,
    expected: FileSum,
    *,
    thorough: bool = False,
    add: Callable[[int], None] | None = None,
    forget: bool = True,
) -> str | None:
    """How a file differs from what it should be, to go behind its name; None where it does not.

    thorough: by the whole file's blake2b, else by the crc32 of its data, which finds what disks and cables
    do. add: takes counts of bytes as they are read. The file is read in small pieces. forget: they do not
    stay in the page cache.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"has {size:,} bytes instead of {expected.size:,}"
        seen, crc32 = Summing(expected.start), 0
        for piece in _pieces(path, 0 if thorough else expected.start, forget):
            if thorough:
                seen.add(piece)
            else:
                crc32 = zlib.crc32(piece, crc32)
            if add is not None:
                add(len(piece))
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    whole = seen.result() == expected if thorough else crc32 == expected.crc32
    return None if whole else "is damaged: its checksum is not the one it was written with"


def _pieces(path: Path, start: int, forget: bool) -> Iterator[memoryview]:
    """The bytes of a file from `start` on. A piece holds until the next one is asked for."""
    memory = bytearray(_PIECE)
    with open(open_regular(path), "rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(memory):
            yield memoryview(memory)[:count]
            if forget:
                forget_pages(file.fileno(), start, count)
            start += count


def forget_pages(fd: int, start: int, count: int) -> None:
    """Tell the system that these bytes of a file will not be read again soon, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)

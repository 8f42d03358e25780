"""Checksums of weight files: a fast one for bytes that are read anyway, and a thorough one."""

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
class FileChecksum:
    """Expected size and checksums of a safetensors file.

    Args:
        size: Bytes of the file.
        start: Offset of the data, after the header.
        crc32: CRC-32 of the data, from `start` to the end. A streamed layer has these bytes in memory.
        blake2b: BLAKE2b of the whole file, in hexadecimal.
    """

    size: Whole
    start: Whole
    crc32: Whole
    blake2b: Printable


class FileHasher:
    """Incremental checksums of a file, fed in order in buffers of any size; its data begins at `start`."""

    def __init__(self, start: int) -> None:
        self._start, self._size, self._crc32 = start, 0, 0
        self._blake2b = hashlib.blake2b(digest_size=32)

    def add(self, buffer: memoryview) -> None:
        """Add the next bytes."""
        self._crc32 = zlib.crc32(buffer[max(0, self._start - self._size) :], self._crc32)
        self._blake2b.update(buffer)
        self._size += len(buffer)

    def result(self) -> FileChecksum:
        return FileChecksum(self._size, self._start, self._crc32, self._blake2b.hexdigest())


def stamp(file: Path) -> bytes:
    """Return a file's size and modification time, which reveal a change. Raises MissingTensorError."""
    try:
        stat = file.stat()
    except OSError as error:
        raise MissingTensorError(f"{file} is gone: {error.strerror or error}") from error
    return repr((stat.st_size, stat.st_mtime_ns)).encode()


def checksum_of(data: bytes) -> FileChecksum:
    """Return the checksum of a file with these bytes and no header."""
    seen = FileHasher(0)
    seen.add(memoryview(data))
    return seen.result()


def find_damage(
    path: Path,
    expected: FileChecksum,
    *,
    thorough: bool = False,
    add: Callable[[int], None] | None = None,
    forget: bool = True,
) -> str | None:
    """Return how a file differs from its expected contents, as a predicate for its name; None if intact.

    Args:
        path: The file, which is read in small pieces.
        expected: Its size and checksums.
        thorough: Compare the BLAKE2b of the whole file; otherwise the CRC-32 of its data, which detects the
            errors of disks and cables.
        add: Receives the number of bytes of each piece.
        forget: Drop the bytes from the page cache after reading.
    """
    try:
        size = path.stat().st_size
        if size != expected.size:
            return f"has {size:,} bytes instead of {expected.size:,}"
        seen, crc32 = FileHasher(expected.start), 0
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
    """Yield the bytes of a file from `start` on. A piece is valid until the next one is read."""
    memory = bytearray(_PIECE)
    with open(open_regular(path), "rb", buffering=0) as file:
        file.seek(start)
        while count := file.readinto(memory):
            yield memoryview(memory)[:count]
            if forget:
                forget_pages(file.fileno(), start, count)
            start += count


def forget_pages(fd: int, start: int, count: int) -> None:
    """Advise the system, if it supports it, that these bytes of a file will not be read again soon."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, count, os.POSIX_FADV_DONTNEED)

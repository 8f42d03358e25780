"""Checkpoint reads that bypass the page cache.

Layers are read cyclically, which defeats an LRU page cache, and cached pages would count against the memory
limit. So files are opened with O_DIRECT. If the file system does not support it, reads are buffered, their
pages are dropped afterwards, and `DirectReader.buffered` lists the files.
"""

import errno
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from offspec.checkpoint.checksum import FileChecksum, find_damage
from offspec.core.errors import CheckpointError, OffspecError, StreamError
from offspec.core.files import FileStamp, open_regular
from offspec.stream.arena import PAGE
from offspec.stream.layout import UnitLayout

_CHANGED = (
    "the file ended early or was changed while it was in use: was it truncated or replaced? "
    "Restore it (if necessary, download it again) and load the model again"
)

_TICK_NS = 20 * 10**6  # mtime has a resolution of up to 10 ms, so two changes within one step look like one


@dataclass(frozen=True, slots=True)
class ReadShape:
    """Shape of reads: `depth` concurrent requests, with one thread each, of `block` bytes each."""

    depth: int = 2
    block: int = 4 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """Open file with its stamp at opening. direct: whether it bypasses the page cache."""

    descriptor: int
    stamp: FileStamp
    direct: bool


class DirectReader:
    """Reader of aligned file ranges that opens each file once. Thread-safe.

    `buffered` lists the files that could not be opened with O_DIRECT. Modifying a file while it is in use, or
    replacing it before it is opened, is an error, because a pass must never mix the weights of two models.
    Only checksums of everything read could show that the contents are still the same.

    Args:
        sums: Known checksums of files.
        remedy: Advice in the error if a checksum does not match.
        stamps: Stamps of files whose headers were read, taken at that time.
    """

    def __init__(
        self,
        sums: Mapping[Path, FileChecksum] | None = None,
        remedy: str = "",
        stamps: Mapping[Path, FileStamp] | None = None,
    ) -> None:
        self._sums, self._remedy = dict(sums or {}), remedy
        self._stamps = dict(stamps or {})
        self._summed: set[str] = set()
        self._whole: set[Path] = set()  # files whose checksum was verified
        self._files: dict[Path, _File] = {}
        self._retired: list[int] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def buffered(self) -> set[Path]:
        return {path for path, file in self._files.items() if not file.direct}

    def open(self, paths: Iterable[Path]) -> None:
        """Open files now, so that later changes to them are detected.

        A file that cannot be opened is reported when it is read.
        """
        for path in paths:
            with suppress(StreamError):
                self._file(path)

    def _file(self, path: Path) -> _File:
        with self._lock:
            if self._closed:
                raise StreamError("the model was closed", file=path, offset=0)
            if path not in self._files:
                self._files[path] = _open(path, self._stamps.get(path))
            return self._files[path]

    def _reopen_buffered(self, path: Path) -> _File:
        with self._lock:
            file = self._files[path]
            if file.direct:
                self._retired.append(file.descriptor)  # another thread may be reading from it
                descriptor = open_regular(
                    f"/proc/self/fd/{file.descriptor}"
                )  # even if it was renamed or replaced
                file = self._files[path] = replace(file, descriptor=descriptor, direct=False)
            return file

    def check_unit(self, layout: UnitLayout, memory: memoryview) -> None:
        """Compare the files of a unit with their checksums after its first read.

        memory: buffer that holds the unit. Raises CheckpointError.
        """
        if not self._sums or layout.name in self._summed:
            return
        for extent in layout.extents:
            known = self._sums.get(extent.file)
            if known is None:
                continue
            if (extent.offset, extent.needed) != (known.start, known.size - known.start):
                self._check_file(extent.file)  # the file was not read completely
            elif zlib.crc32(memory[extent.start : extent.start + extent.needed]) != known.crc32:
                raise self._damaged(extent.file, "is damaged: its checksum does not match its pack")
        self._summed.add(layout.name)

    def check_files(self, except_for: Iterable[Path]) -> None:
        """Compare the checksums of all other files, reading each completely. Raises CheckpointError."""
        for path in self._sums.keys() - set(except_for):
            self._check_file(path)

    def _check_file(self, path: Path) -> None:
        if path in self._whole:
            return
        if how := find_damage(path, self._sums[path]):
            raise self._damaged(path, how)
        self._whole.add(path)

    def _damaged(self, path: Path, how: str) -> CheckpointError:
        return CheckpointError(f"{path} {how}; {self._remedy}")

    def read_into(self, path: Path, offset: int, target: memoryview, needed: int) -> int:
        """Fill a buffer from a file and return the number of bytes read.

        Args:
            path: File to read.
            offset: Offset of the first byte, a multiple of the page size.
            target: Buffer whose address and length are multiples of the page size.
            needed: Bytes that must exist; the rest is padding that may lie beyond the end of the file.

        Raises:
            StreamError: The read failed.
        """
        assert offset % PAGE == 0 and len(target) % PAGE == 0 and needed <= len(target)
        with _errors_at(path, offset):
            return self._read_into(path, offset, target, needed)

    def _read_into(self, path: Path, offset: int, target: memoryview, needed: int) -> int:
        file, done = self._file(path), 0
        while done < needed:
            try:
                count = os.preadv(file.descriptor, [target[done:]], offset + done)
            except InterruptedError:
                continue
            except OSError as error:
                if error.errno == errno.EINVAL and file.direct:
                    file = self._reopen_buffered(path)  # O_DIRECT can open the file but not read it
                    continue
                raise StreamError(
                    f"read failed: {error.strerror}", file=path, offset=offset + done
                ) from error
            if done + count < needed and file.direct:
                count -= count % PAGE  # O_DIRECT needs an aligned offset to continue
            if count == 0:
                raise StreamError(_CHANGED, file=path, offset=offset + done)
            done += count
        now = FileStamp.of(file.descriptor)  # after the read, to detect changes during it
        if now != file.stamp:
            raise StreamError(_CHANGED, file=path, offset=min(offset, now.size))
        if not file.direct:
            os.posix_fadvise(file.descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for descriptor in (*(file.descriptor for file in self._files.values()), *self._retired):
                os.close(descriptor)
            self._files.clear()
            self._retired.clear()


@contextmanager
def _errors_at(path: Path, offset: int) -> Iterator[None]:
    """Turn any failure into a StreamError with file and offset."""
    try:
        yield
    except OffspecError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise StreamError(f"reading failed: {text}", file=path, offset=offset) from error


def _open(path: Path, stamp: FileStamp | None) -> _File:
    """Open a file. stamp: its expected stamp, if known."""
    with_direct = getattr(os, "O_DIRECT", 0)
    try:
        if with_direct:
            try:
                return _opened(path, stamp, with_direct)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        return _opened(path, stamp, 0)
    except OSError as error:
        raise StreamError(f"cannot open a weight file: {error.strerror}", file=path, offset=0) from error


def _opened(path: Path, stamp: FileStamp | None, with_direct: int) -> _File:
    descriptor = open_regular(path, with_direct)
    try:
        found = FileStamp.of(descriptor)
        if 0 <= (age := time.time_ns() - found.mtime_ns) < _TICK_NS:
            time.sleep((_TICK_NS - age) / 1e9)
        if FileStamp.of(descriptor) != (stamp or found):
            raise StreamError(_CHANGED, file=path, offset=0)
        return _File(descriptor, found, direct=bool(with_direct))
    except BaseException:
        os.close(descriptor)
        raise

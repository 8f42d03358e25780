"""Reading checkpoints past the page cache.

A streamed model is read in the same order for ever, the worst case of an LRU cache, and cached pages would
count against the memory limit. So files are opened with O_DIRECT; where the file system
refuses, reads are buffered and their pages dropped again, and the reader says so.
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

from offspec.checkpoint.checksum import FileSum, damage
from offspec.core.errors import CheckpointError, OffspecError, StreamError
from offspec.core.files import FileStamp, open_regular
from offspec.stream.arena import PAGE
from offspec.stream.layout import UnitLayout

_CHANGED = (
    "the file ended early or was changed while it was in use: was it truncated or replaced? "
    "Have it whole again (download it again if need be) and load the model again"
)

_TICK_NS = 20 * 10**6  # times of files are told in steps of up to 10 ms: two changes in one look like one


@dataclass(frozen=True, slots=True)
class ReadShape:
    """How a file is read: `depth` requests under way at once (a thread each), of `block` bytes each."""

    depth: int = 2
    block: int = 4 << 20


@dataclass(frozen=True, slots=True)
class _File:
    """An open file, and its stamp then. direct: opened past the page cache."""

    descriptor: int
    stamp: FileStamp
    direct: bool


class DirectReader:
    """Opens each file once and reads aligned ranges of it. Safe to use from several threads.

    `buffered` names the files that could not be opened with O_DIRECT. A file that is written to while it is
    in use, or replaced before it is opened, is an error: weights of two models must never meet in one pass.
    Whether it holds the same after that could only be told by sums of all that was ever read.

    Args:
        sums: What files must hold, where that is known.
        remedy: What to do where one does not.
        stamps: Of files as their headers were read, where they were.
    """

    def __init__(
        self,
        sums: Mapping[Path, FileSum] | None = None,
        remedy: str = "",
        stamps: Mapping[Path, FileStamp] | None = None,
    ) -> None:
        self._sums, self._remedy = dict(sums or {}), remedy
        self._stamps = dict(stamps or {})
        self._summed: set[str] = set()
        self._whole: set[Path] = set()  # files all of whose bytes were found to be right
        self._files: dict[Path, _File] = {}
        self._retired: list[int] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def buffered(self) -> set[Path]:
        return {path for path, file in self._files.items() if not file.direct}

    def open(self, paths: Iterable[Path]) -> None:
        """Open files now, so that what is done to them from here on is noticed.

        One that cannot be opened is told about when it is read.
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
                descriptor = open_regular(f"/proc/self/fd/{file.descriptor}")  # whatever has its name by now
                file = self._files[path] = replace(file, descriptor=descriptor, direct=False)
            return file

    def check_unit(self, layout: UnitLayout, memory: memoryview) -> None:
        """When a unit was read for the first time, compare its whole files' bytes with their checksums.

        memory: where it was read to. Raises CheckpointError.
        """
        if not self._sums or layout.name in self._summed:
            return
        for extent in layout.extents:
            known = self._sums.get(extent.file)
            if known is None:
                continue
            if (extent.offset, extent.needed) != (known.start, known.size - known.start):
                self._check_file(extent.file)  # not all of it was read
            elif zlib.crc32(memory[extent.start : extent.start + extent.needed]) != known.crc32:
                raise self._damaged(extent.file, "is damaged: its checksum is not that of its pack")
        self._summed.add(layout.name)

    def check_files(self, except_for: Iterable[Path]) -> None:
        """The same for files that hold more than one unit, which are read whole. Raises CheckpointError."""
        for path in self._sums.keys() - set(except_for):
            self._check_file(path)

    def _check_file(self, path: Path) -> None:
        if path in self._whole:
            return
        if how := damage(path, self._sums[path]):
            raise self._damaged(path, how)
        self._whole.add(path)

    def _damaged(self, path: Path, how: str) -> CheckpointError:
        return CheckpointError(f"{path} {how}; {self._remedy}")

    def read_into(self, path: Path, offset: int, target: memoryview, needed: int) -> int:
        """Fill a buffer from a file; returns the bytes that came from it.

        Args:
            path: The file.
            offset: Of the first byte, a multiple of the page size.
            target: The buffer, whose address and length are multiples of the page size.
            needed: Bytes that must exist; the rest is padding that may lie beyond the file's end.

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
                    file = self._reopen_buffered(path)  # opened with O_DIRECT, but cannot be read so
                    continue
                raise StreamError(
                    f"read failed: {error.strerror}", file=path, offset=offset + done
                ) from error
            if done + count < needed and file.direct:
                count -= count % PAGE  # O_DIRECT wants an aligned offset to go on from
            if count == 0:
                raise StreamError(_CHANGED, file=path, offset=offset + done)
            done += count
        if (
            now := FileStamp.of(file.descriptor)
        ) != file.stamp:  # after the read: what it brought is of before
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
    """Any failure becomes a StreamError that names the place."""
    try:
        yield
    except OffspecError:
        raise
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise StreamError(f"reading failed: {text}", file=path, offset=offset) from error


def _open(path: Path, stamp: FileStamp | None) -> _File:
    """Open a file; stamp: what it must have, where that is known."""
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

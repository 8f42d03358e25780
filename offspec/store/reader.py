"""Reading checkpoints past the page cache.

A streamed model is read in the same order for ever, the worst case of an LRU cache, and cached pages would
count against the memory that was promised. So files are opened with O_DIRECT; where the file system
refuses, reads are buffered and their pages dropped again, and the reader says so.
"""

import errno
import os
import threading
from pathlib import Path

from offspec.errors import StreamError
from offspec.store.arena import PAGE

BLOCK = 4 << 20  # bytes asked for at a time: large enough for full speed, small enough to share among threads


class DirectReader:
    """Opens each file once and reads aligned ranges of it. Safe to use from several threads.

    `buffered` names the files that could not be opened with O_DIRECT.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._retired: list[int] = []
        self._lock = threading.Lock()
        self.buffered: set[Path] = set()

    def _descriptor(self, file: Path) -> int:
        with self._lock:
            if file not in self._descriptors:
                self._descriptors[file] = self._open(file)
            return self._descriptors[file]

    def _open(self, file: Path) -> int:
        direct = getattr(os, "O_DIRECT", 0)
        try:
            if direct:
                try:
                    return os.open(file, os.O_RDONLY | os.O_CLOEXEC | direct)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
            self.buffered.add(file)
            return os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StreamError(f"cannot open a weight file: {error.strerror}", file=file, offset=0) from error

    def _reopen_buffered(self, file: Path) -> int:
        with self._lock:
            if file not in self.buffered:
                self.buffered.add(file)
                self._retired.append(self._descriptors[file])  # another thread may be reading from it
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            return self._descriptors[file]

    def read_into(self, file: Path, offset: int, target: memoryview, needed: int) -> int:
        """Fill `target` from `offset`; returns the bytes that came from the file.

        offset, the length of target and its address are multiples of the page size; `needed` of the bytes
        must exist, the rest is padding that may lie beyond the file's end. Raises StreamError.
        """
        assert offset % PAGE == 0 and len(target) % PAGE == 0 and needed <= len(target)
        descriptor, done = self._descriptor(file), 0
        while done < needed:
            try:
                count = os.preadv(descriptor, [target[done : done + BLOCK]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and file not in self.buffered:
                    descriptor = self._reopen_buffered(file)  # opened with O_DIRECT, but cannot be read so
                    continue
                raise StreamError(
                    f"read failed: {error.strerror}", file=file, offset=offset + done
                ) from error
            if done + count < needed and file not in self.buffered:
                count -= count % PAGE  # O_DIRECT wants an aligned offset to go on from
            if count == 0:
                raise StreamError(
                    "the file ended early: was it truncated or replaced? Download it again",
                    file=file,
                    offset=offset + done,
                )
            done += count
        if file in self.buffered:
            os.posix_fadvise(descriptor, offset, len(target), os.POSIX_FADV_DONTNEED)
        return done

    def close(self) -> None:
        with self._lock:
            for descriptor in (*self._descriptors.values(), *self._retired):
                os.close(descriptor)
            self._descriptors.clear()
            self._retired.clear()

"""Disk read rate: large files read past the page cache."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offspec_planners.hardware_rates import Rate

_BLOCK = 4 << 20  # bytes per read
# Threads and bytes per read. Disks differ in their best shape; the result is the best of these.
_SHAPES = ((1, 4 << 20), (2, 4 << 20), (2, 16 << 20), (4, 1 << 20), (4, 4 << 20), (8, 1 << 20))
_SWEEP_SHARE = 4  # a trial of a shape reads this much less than a reading
_FIRST_LOOK = 0.1  # seconds of reading to determine how much to read
_READINGS = 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Read rate: `nbytes` in `seconds`; `direct` is False if the file system refused O_DIRECT."""

    nbytes: int
    seconds: float
    direct: bool

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


def _open(path: Path) -> tuple[int, bool]:
    """Return a descriptor, and whether it reads past the page cache."""
    if hasattr(os, "O_DIRECT"):
        try:
            return os.open(path, os.O_RDONLY | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return os.open(path, os.O_RDONLY), False


def reads_past_cache(path: Path) -> bool:
    """Return whether the file system supports O_DIRECT for the file. Raises OSError."""
    fd, direct = _open(path)
    os.close(fd)
    return direct


def read_bandwidth(
    files: Sequence[Path],
    *,
    limit_bytes: int,
    threads: int = 2,
    block: int = _BLOCK,
    start: int = 0,
    seconds: float | None = None,
) -> Bandwidth:
    """Read files in order past the page cache, and time it.

    Starts over with the first file after the last.

    Args:
        files: Files to read.
        limit_bytes: Approximate maximum to read; each byte is read at most once.
        threads: Concurrent reads, 2 by default.
        block: Bytes per read, a multiple of 4096.
        start: Offset to begin at, over all files, 0 by default.
        seconds: Time limit; no limit by default.

    Raises:
        OSError: A read fails.
    """
    blocks = [(path, offset) for path in files for offset in range(0, path.stat().st_size, block)]
    first = start // block % len(blocks) if blocks else 0
    work = islice(blocks[first:] + blocks[:first], -(-limit_bytes // block))
    lock, stopped, begun = threading.Lock(), threading.Event(), time.perf_counter()

    def read_blocks() -> tuple[int, bool]:
        """Read until no work or no time is left; return bytes, and whether past the page cache."""
        nbytes, path, fd, past_cache = 0, None, -1, True
        with mmap.mmap(-1, block) as buffer:  # anonymous memory is page-aligned, as O_DIRECT requires
            try:
                while not stopped.is_set() and (seconds is None or time.perf_counter() <= begun + seconds):
                    with lock:
                        item = next(work, None)
                    if item is None:
                        break
                    if item[0] != path:
                        if fd >= 0:
                            os.close(fd)
                        path, (fd, direct) = item[0], _open(item[0])
                        past_cache = past_cache and direct
                    nbytes += os.preadv(fd, [buffer], item[1])
            finally:
                if fd >= 0:
                    os.close(fd)
        return nbytes, past_cache

    with ThreadPoolExecutor(threads) as pool:
        try:
            found = [reader.result() for reader in [pool.submit(read_blocks) for _ in range(threads)]]
        except BaseException:
            stopped.set()
            raise
    spent = time.perf_counter() - begun
    return Bandwidth(sum(nbytes for nbytes, _ in found), spent, all(direct for _, direct in found))


class RawDisk:
    """Readings of files with O_DIRECT, in the shape (threads, block) that was fastest at the start.

    Each reading of about `nbytes` continues where the previous one ended, so that nothing is read twice in a
    row. readings: all readings so far, bytes per second. Raises OSError if a read fails.
    """

    def __init__(self, files: Sequence[Path], nbytes: int, shape: tuple[int, int] | None = None) -> None:
        self._files, self._nbytes, self._at = list(files), nbytes, 0
        self.readings: list[float] = []
        self.direct = True
        self.sweep: dict[tuple[int, int], float] = {}
        if shape is None:
            for tried in (*_SHAPES, *reversed(_SHAPES)):  # back and forth, since the disk's speed drifts
                rate = self._read(tried, max(nbytes // _SWEEP_SHARE, tried[0] * tried[1]))
                self.sweep[tried] = max(self.sweep.get(tried, 0.0), rate)
            shape = max(self.sweep, key=lambda tried: self.sweep[tried])
        self.threads, self.block = shape

    def _read(self, shape: tuple[int, int], nbytes: int) -> float:
        threads, block = shape
        reading = read_bandwidth(
            self._files, limit_bytes=nbytes, threads=threads, block=block, start=self._at
        )
        self._at += max(nbytes, block)
        self.direct = self.direct and reading.direct
        return reading.bytes_per_s

    def read(self) -> float:
        """Return bytes per second, measured now."""
        self.readings.append(self._read((self.threads, self.block), self._nbytes))
        return self.readings[-1]

    def sweep_json(self) -> dict[str, float]:
        return {f"{threads}x{block >> 20}MiB": rate for (threads, block), rate in self.sweep.items()}


def disk_rate(files: Sequence[Path], seconds: float = 0.3) -> Rate:
    """Return the disk's rate for these files with the best shape of read.

    Takes about nine times `seconds`, each reading about `seconds`. Raises OSError if a read fails.
    """
    look = read_bandwidth(files, limit_bytes=1 << 40, seconds=_FIRST_LOOK)
    disk = RawDisk(files, max(int(look.bytes_per_s * seconds), _BLOCK))
    return Rate.of([float(round(disk.read())) for _ in range(_READINGS)])

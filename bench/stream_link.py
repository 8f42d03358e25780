"""The link by itself: the rate at which files are read past the page cache, and pinned memory is copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.rates import read_bandwidth

# Threads and bytes of one read. Disks differ in what they like best, and the ceiling is the best of them.
_SHAPES = ((1, 4 << 20), (2, 4 << 20), (2, 16 << 20), (4, 1 << 20), (4, 4 << 20), (8, 1 << 20))
_SWEEP_SHARE = 4  # a trial of a shape reads so much less than a reading
_COPIED = (256 << 20, 1 << 30)  # bytes of an arena that is copied to the device
_COPIES = 8


class RawDisk:
    """Readings of files with O_DIRECT, in the shape (threads, block) that was fastest at the start.

    Each reading of about `nbytes` goes on with the file after those of the last, so that none is read twice
    in a row. readings: all of them so far, bytes per second. Raises OSError as reads do.
    """

    def __init__(self, files: Sequence[Path], nbytes: int, shape: tuple[int, int] | None = None) -> None:
        self._files, self._nbytes, self._next = list(files), nbytes, 0
        self.readings: list[float] = []
        self.direct = True
        self.sweep: dict[tuple[int, int], float] = {}
        if shape is None:
            for tried in (*_SHAPES, *reversed(_SHAPES)):  # in turns: the disk drifts
                rate = self._read(tried, max(nbytes // _SWEEP_SHARE, tried[1]))
                self.sweep[tried] = max(self.sweep.get(tried, 0.0), rate)
            shape = max(self.sweep, key=lambda tried: self.sweep[tried])
        self.threads, self.block = shape

    def _read(self, shape: tuple[int, int], nbytes: int) -> float:
        turn = self._next % len(self._files)
        files = self._files[turn:] + self._files[:turn]
        reading = read_bandwidth(files, limit_bytes=nbytes, threads=shape[0], block=shape[1])
        covered = 0
        for file in files:
            if covered >= nbytes:
                break
            covered += file.stat().st_size
            self._next += 1
        self.direct = self.direct and reading.direct
        return reading.bytes_per_s

    def read(self) -> float:
        """Bytes per second, now."""
        self.readings.append(self._read((self.threads, self.block), self._nbytes))
        return self.readings[-1]

    def sweep_json(self) -> dict[str, float]:
        return {f"{threads}x{block >> 20}MiB": rate for (threads, block), rate in self.sweep.items()}


def copy_bandwidth() -> float:
    """Bytes per second from pinned memory to the CUDA device: the best of several large copies.

    cudaMemcpyAsync on a stream of its own, timed by the device's events.
    """
    import torch

    best, stream = 0.0, torch.cuda.Stream()
    for size in _COPIED:
        source = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            for _ in range(_COPIES):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record(stream)
                target.copy_(source, non_blocking=True)
                end.record(stream)
                end.synchronize()
                best = max(best, size / (start.elapsed_time(end) / 1000))
        del source, target
    torch.cuda.empty_cache()
    return best

"""The two ceilings of a pass: how fast the disk gives bytes, and how fast the processor multiplies."""

from __future__ import annotations

import argparse
import errno
import json
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_BLOCK = 4 << 20  # bytes of one read


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """A read rate: `nbytes` in `seconds`; `direct` is False where the file system refused O_DIRECT."""

    nbytes: int
    seconds: float
    direct: bool

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class GemmRate:
    """A batch of `tokens` against matrices that lie in RAM, not in the processor's cache."""

    tokens: int
    flops_per_s: float


class _BlockReader:
    """Reads blocks of files on several threads, each into a buffer of its own."""

    def __init__(self, files: Sequence[Path], limit: int, block: int) -> None:
        self._block = block
        self._work = _blocks(files, limit, block)
        self._lock = threading.Lock()
        self.nbytes = 0
        self.direct = True
        self.error: OSError | None = None

    def run(self) -> None:
        """Read until no work is left; an error ends this thread and is kept for the caller."""
        buffer = mmap.mmap(-1, self._block)  # anonymous memory starts at a page, as O_DIRECT wants
        path, fd = None, -1
        try:
            while True:
                with self._lock:
                    item = next(self._work, None)
                if item is None:
                    return
                if item[0] != path:
                    if fd >= 0:
                        os.close(fd)
                    path, fd = item[0], self._open(item[0])
                count = os.preadv(fd, [buffer], item[1])
                with self._lock:
                    self.nbytes += count
        except OSError as error:
            self.error = error
        finally:
            if fd >= 0:
                os.close(fd)
            buffer.close()

    def _open(self, path: Path) -> int:
        if hasattr(os, "O_DIRECT"):
            try:
                return os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
        self.direct = False
        return os.open(path, os.O_RDONLY)


def _blocks(files: Sequence[Path], limit: int, block: int) -> Iterator[tuple[Path, int]]:
    """(file, offset) of every block, in order, until about `limit` bytes are covered."""
    covered = 0
    for path in files:
        for offset in range(0, path.stat().st_size, block):
            if covered >= limit:
                return
            covered += block
            yield path, offset


def read_bandwidth(
    files: Sequence[Path], *, limit_bytes: int, threads: int = 2, block: int = _BLOCK
) -> Bandwidth:
    """Read files in order past the page cache, at most about `limit_bytes`, and time it.

    Raises OSError as the reads do. `block` must be a multiple of 4096.
    """
    reader = _BlockReader(files, limit_bytes, block)
    workers = [threading.Thread(target=reader.run) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    if reader.error is not None:
        raise reader.error
    return Bandwidth(reader.nbytes, seconds, reader.direct)


def gemm_rates(
    tokens: Sequence[int], *, rows: int, columns: int, dtype: str, seconds: float = 0.4
) -> list[GemmRate]:
    """FLOP/s of `x [T, columns] @ w [rows, columns]^T` for each T, with torch's threads as they are.

    The matrices are taken in turns from 128 MB or more, as the layers of a streamed model are, so that a
    batch of one shows what memory gives and a large one what the processor can do.
    """
    import torch

    kind = getattr(torch, dtype)
    count = max(2, -(-128_000_000 // (rows * columns * kind.itemsize)))
    matrices = [torch.randn(rows, columns, dtype=kind) for _ in range(count)]
    rates = []
    with torch.inference_mode():
        for size in tokens:
            x = torch.randn(size, columns, dtype=kind)  # [T, columns]
            for w in matrices[:2]:
                torch.nn.functional.linear(x, w)
            done, start = 0, time.perf_counter()
            while (spent := time.perf_counter() - start) < seconds or done < 2:
                torch.nn.functional.linear(x, matrices[done % count])
                done += 1
            rates.append(GemmRate(size, 2.0 * size * rows * columns * done / spent))
    return rates


def main() -> None:
    """Print GEMM rates as JSON: run as a program so that the caller need not load torch itself."""
    parser = argparse.ArgumentParser(prog="python -m bench.rates", description=main.__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 512])
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--columns", type=int, default=2304)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args()
    rates = gemm_rates(args.tokens, rows=args.rows, columns=args.columns, dtype=args.dtype)
    print(json.dumps([asdict(rate) for rate in rates]))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()

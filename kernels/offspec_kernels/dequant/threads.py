"""Distribution of work to torch's compute threads.

After a product torch's OpenMP threads keep spinning for more work for a while, on every core. Separate
threads would compete with them for the cores just when weights must be dequantized for the next product. So
the work runs in torch's thread team if it can be found, else in a thread pool.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offspec_kernels.dequant.native import Array

LEAST = 1 << 15  # minimum values per thread
LEAST_PRODUCT = 1 << 20  # minimum for a weight times some rows: distributing work takes about 0.2 ms
LEAST_SHARED = 1 << 17  # minimum if no Python code runs in between
_ROWS = 64  # rows for which multiplying a weight takes about as long as reading it

Work = Callable[[int, int], None]
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def parallel_for(work: Work, count: int, values: int, least: int = LEAST) -> None:
    """Call work(start, end) for ranges that cover [0, count), on as many threads as torch uses.

    Returns, or raises, only when no thread is running any more, even after an interrupt: the memory that they
    write to may be reused next.

    Args:
        work: Function applied to a range. Nested parallel work stays on its thread, unless there is only one
            range and enough work in it.
        count: Number of items to share out.
        values: Total number of values to produce.
        least: Minimum values per thread.
    """
    threads = 1 if getattr(_this_thread, "works", False) else torch.get_num_threads()
    paying = max(values // least, 1)
    parts = max(min(threads, count, paying), 1)
    if parts == 1:
        if paying == 1:
            _marked(work, 0, count)
        else:
            work(0, count)
        return
    edges = [count * part // parts for part in range(parts + 1)]
    ranges = list(pairwise(edges))
    work = partial(_marked, work)
    library = _openmp() if os.getpid() == _PROCESS else None  # a fork does not inherit the team's threads
    if library is None:
        _by_pool(work, ranges)
    else:
        _by_team(library, work, ranges)


def parallel_for_product(work: Work, count: int, values: int, rows: int) -> None:
    """Call `parallel_for` for a weight of `values` values multiplied by `rows` rows."""
    parallel_for(work, count, values * (1 + rows // _ROWS), LEAST_PRODUCT)


def run_parallel(loop: int, job: "Array", keep_alive: Sequence[object], values: int) -> None:
    """Call a compiled loop(job) on as many threads as torch uses, or on this thread if few values are
    produced.

    The threads divide the work among themselves: each claims one part after another while parts are left. A
    thread slowed down by other processes thus leaves more parts to the rest.

    Args:
        loop: Address of the loop, from `native.compile_job`.
        job: Array whose address is passed to the loop.
        keep_alive: Objects at addresses in the job, kept alive while any thread may be running.
        values: Total number of values to produce, each for the few rows of a typical call.
    """
    threads = 1 if getattr(_this_thread, "works", False) else torch.get_num_threads()
    body = _Body(loop)
    if threads == 1 or values < 2 * LEAST_SHARED:
        body(job.ctypes.data)
    elif (library := _openmp() if os.getpid() == _PROCESS else None) is not None:
        library.GOMP_parallel(body, job.ctypes.data, threads, 0)
    else:
        # A pool thread may start after an interrupt, so its work keeps the memory alive.
        work = partial(_call, body, job, keep_alive)
        _by_pool(work, [(part, part + 1) for part in range(threads)])


def _call(body: Callable[[int], None], job: "Array", used: Sequence[object], start: int, end: int) -> None:
    body(job.ctypes.data)


_PROCESS = os.getpid()
_this_thread = threading.local()


def _marked(work: Work, start: int, end: int) -> None:
    before = getattr(_this_thread, "works", False)
    _this_thread.works = True
    try:
        work(start, end)
    finally:
        _this_thread.works = before


def _by_team(library: ctypes.CDLL, work: Work, ranges: list[tuple[int, int]]) -> None:
    done, errors = list[int](), list[BaseException]()

    def body(_: int) -> None:
        try:
            # There may be fewer threads than requested.
            for part in range(library.omp_get_thread_num(), len(ranges), library.omp_get_num_threads()):
                work(*ranges[part])
                done.append(part)
        except BaseException as error:
            errors.append(error)

    # Always the same number: OpenMP ends threads when a smaller team is requested and recreates them for a
    # larger.
    library.GOMP_parallel(_Body(body), None, torch.get_num_threads(), 0)
    if errors:
        raise errors[0]
    if len(done) < len(ranges):  # Ctrl-C arrived while `body` could not catch it
        raise KeyboardInterrupt


@cache
def _openmp() -> ctypes.CDLL | None:
    """Return GNU OpenMP if this process computes with it: the very library that torch has loaded."""
    with suppress(OSError, AttributeError):
        mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
        found = [path for path in mapped if path.name.startswith("libgomp")]
        # Other packages may bundle their own copy; torch's is in torch's folder, or is the system's.
        home = Path(torch.__file__).resolve().parent  # as in the memory map, with links resolved
        own = [path for path in found if home in path.parents] or found
        if len(own) != 1:
            return None
        library = ctypes.CDLL(str(own[0]))
        library.GOMP_parallel.argtypes = [_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        return library
    return None


def _by_pool(work: Work, ranges: list[tuple[int, int]]) -> None:
    futures = list[Future[None]]()
    try:
        pool = _pool(os.getpid())
        futures += (pool.submit(work, *part) for part in ranges[1:])
        work(*ranges[0])
    finally:
        _wait_for_all(futures)
    for future in futures:
        future.result()


def _wait_for_all(futures: list[Future[None]]) -> None:
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait(futures)
            break
        except KeyboardInterrupt as caught:
            interrupt = caught
    if interrupt is not None:
        raise interrupt


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """Return this process's threads; a fork has none of its parent's.

    No lock is used, since a fork might inherit it locked.
    """
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dequant")

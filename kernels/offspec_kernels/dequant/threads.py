"""Work for the threads that torch computes with.

After a product torch's OpenMP threads go on looking for more for a while, on every core there is. Threads of
our own would have to share the cores with them, just when weights are to be unpacked for the next product. So
the work is given to that very team, where it can be found, and to a pool of threads elsewhere.
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

LEAST = 1 << 15  # values for which a thread of their own pays
LEAST_PRODUCT = 1 << 20  # the same of a weight times some rows: to give out work takes some 0.2 ms
LEAST_SHARED = 1 << 17  # the same where no line of Python runs in between
_ROWS = 64  # rows that take about as long to multiply a weight with as it takes to read it

Work = Callable[[int, int], None]
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def spread(work: Work, count: int, values: int, least: int = LEAST) -> None:
    """Call work(start, end) for ranges that make up [0, count), on as many threads as torch uses.

    Returns, or raises, only when no thread is at work any more, also after an interrupt: the memory that they
    write to may be another's next.

    Args:
        work: What is done with a range. Work inside of it is that thread's own, unless there is one range
            only and enough to do in it.
        count: Of what is shared.
        values: How many are made in all.
        least: Values for which a thread of their own pays.
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
    library = _openmp() if os.getpid() == _PROCESS else None  # a fork has none of the team's threads
    if library is None:
        _by_pool(work, ranges)
    else:
        _by_team(library, work, ranges)


def spread_product(work: Work, count: int, values: int, rows: int) -> None:
    """`spread` for a weight of so many values that is multiplied with some rows."""
    spread(work, count, values * (1 + rows // _ROWS), LEAST_PRODUCT)


def share(loop: int, job: "Array", used: Sequence[object], values: int) -> None:
    """Call a compiled loop(job) on as many threads as torch uses, or on this one where few values are made.

    The threads divide the work among themselves: each claims a part, and another, while there are any. So
    one that others keep from running leaves more to the rest.

    Args:
        loop: Its address, of `native.sharing`.
        job: What it is given the address of.
        used: What lies at addresses in the job, kept as long as any thread may be at work.
        values: How many are made in all, each for the few rows that come with any.
    """
    threads = 1 if getattr(_this_thread, "works", False) else torch.get_num_threads()
    body = _Body(loop)
    if threads == 1 or values < 2 * LEAST_SHARED:
        body(job.ctypes.data)
    elif (library := _openmp() if os.getpid() == _PROCESS else None) is not None:
        library.GOMP_parallel(body, job.ctypes.data, threads, 0)
    else:
        # A thread of the pool may begin behind an interrupt: what it works on is kept with the work.
        work = partial(_call, body, job, used)
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
            # There may be fewer threads than were asked for.
            for part in range(library.omp_get_thread_num(), len(ranges), library.omp_get_num_threads()):
                work(*ranges[part])
                done.append(part)
        except BaseException as error:
            errors.append(error)

    # Always as many: OpenMP ends threads when a smaller team is asked for, and makes them again for a larger.
    library.GOMP_parallel(_Body(body), None, torch.get_num_threads(), 0)
    if errors:
        raise errors[0]
    if len(done) < len(ranges):  # Ctrl-C struck where `body` could not catch it
        raise KeyboardInterrupt


@cache
def _openmp() -> ctypes.CDLL | None:
    """GNU's OpenMP, if that is what this process computes with: the very library that torch has loaded."""
    with suppress(OSError, AttributeError):
        mapped = {Path(line.split()[-1]) for line in Path("/proc/self/maps").read_text().splitlines()}
        found = [path for path in mapped if path.name.startswith("libgomp")]
        # Others may have brought one of their own; torch's lies with torch, or is the system's.
        home = Path(torch.__file__).resolve().parent  # as the map has it, also where a link leads there
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
        _settle(futures)
    for future in futures:
        future.result()


def _settle(futures: list[Future[None]]) -> None:
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
    """The threads of this process; a fork has none of its parent's. No lock: a fork might find it locked."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dequant")

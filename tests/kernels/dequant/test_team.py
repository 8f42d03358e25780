"""Work given to torch's own threads, or to others: all of it done, and nobody at work when it is over."""

import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from offspec_kernels.dequant import threads as team
from offspec_kernels.dequant.native import carray, claim, compile_job
from offspec_kernels.dequant.threads import parallel_for, parallel_for_product, run_parallel

MANY = 4 * team.LEAST  # values that pay for four threads


@pytest.fixture(params=["team", "pool"])
def four_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of torch's threads, or, as where those cannot be had, of our own."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    if request.param == "pool":
        monkeypatch.setattr(team, "_openmp", lambda: None)
    else:
        assert team._openmp() is not None


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    ("count", "values"),
    [(0, MANY), (1, MANY), (3, 100 * MANY), (5, MANY // 2), (1000, 0), (1000, 100 * MANY)],
)
def test_ranges_make_up_the_whole(count: int, values: int) -> None:
    ranges = list[tuple[int, int]]()
    parallel_for(lambda start, end: ranges.append((start, end)), count, values)
    ranges.sort()
    assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
    assert ranges[-1][1] == count
    assert len(ranges) == max(1, min(4, count, values // team.LEAST))


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("rows, expected", [(1, 1), (256, 4)])
def test_a_small_product_and_what_is_inside_stay_in_one_thread(rows: int, expected: int) -> None:
    outer, inner = list[int](), list[int]()

    def work(start: int, end: int) -> None:
        outer.append(start)
        parallel_for(lambda start, end: inner.append(start), 4, MANY)

    parallel_for_product(work, 4, team.LEAST_PRODUCT, rows)
    assert len(outer) == expected and inner == [0] * expected
    inner.clear()
    parallel_for(lambda start, end: inner.append(start), 4, MANY)  # behind it they are shared again
    assert len(inner) == 4


def _count(job: Any) -> None:
    """job: int64, the next part, how many there are, threads that came, and how often each part was done."""
    words = carray(job, 3, np.int64)
    claim(words[2:].ctypes.data)
    counts = carray(job, 3 + words[1], np.int64)[3:]
    while True:
        part = claim(words.ctypes.data)
        if part >= words[1]:
            break
        counts[part] += 1


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("values, most", [(team.LEAST_SHARED, 1), (2 * team.LEAST_SHARED, 4)])
def test_each_part_of_a_shared_loop_is_claimed_once(values: int, most: int) -> None:
    loop = compile_job(_count)
    for parts in (0, 1, 1000):
        job = np.zeros(3 + parts, np.int64)
        job[1] = parts
        run_parallel(loop, job, (), values)
        assert (job[3:] == 1).all() and 1 <= job[2] <= most


def test_a_thread_that_begins_late_finds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may strike where a pool has taken work that nobody waits for."""
    given = list[Any]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(team, "_openmp", lambda: None)
    monkeypatch.setattr(team, "_by_pool", lambda work, ranges: given.append(work))
    job, memory = np.zeros(3, np.int64), torch.zeros(8)
    run_parallel(compile_job(_count), job, (memory,), 2 * team.LEAST_SHARED)
    kept: list[weakref.ref[Any]] = [weakref.ref(job), weakref.ref(memory)]
    del job, memory
    given[0](0, 1)
    assert all(of() is not None for of in kept)


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize("where", [0, 1, 3])
def test_a_failure_in_any_thread_is_told_when_all_are_done(where: int) -> None:
    done = list[int]()

    def work(start: int, end: int) -> None:
        if start == where:
            raise ValueError(f"at {start}")
        time.sleep(0.05)
        done.append(start)

    with pytest.raises(ValueError, match=f"^at {where}$"):
        parallel_for(work, 4, MANY)
    assert sorted(done) == sorted({0, 1, 2, 3} - {where})


def _interrupted(own: Callable[[], None], other: Callable[[], None]) -> list[int]:
    """Which threads were done when spread gave the interrupt on."""
    begun, done = threading.Event(), list[int]()

    def work(start: int, end: int) -> None:
        if start == 0:
            begun.wait(10)
            own()
        else:
            begun.set()
            other()
            time.sleep(0.2)
            done.append(start)

    with pytest.raises(KeyboardInterrupt):
        parallel_for(work, 2, MANY)
    return done


def _raise() -> None:
    raise KeyboardInterrupt


@pytest.mark.usefixtures("four_threads")
def test_an_interrupt_at_work_waits_for_the_others() -> None:
    assert _interrupted(own=_raise, other=lambda: None) == [1]


@pytest.mark.usefixtures("four_threads")
def test_an_interrupt_while_waiting_goes_on_waiting() -> None:
    main = threading.get_ident()

    def press() -> None:
        time.sleep(0.1)  # the main thread has come to the waiting
        signal.pthread_kill(main, signal.SIGINT)

    assert _interrupted(own=lambda: None, other=press) == [1]


_FORKING = """
import os, sys, torch
from offspec_kernels.dequant.threads import parallel_for, parallel_for_product
torch.get_num_threads = lambda: 4
done = []
parallel_for(lambda start, end: done.append(start), 4, 1 << 20)
child = os.fork()
if child == 0:
    parallel_for(lambda start, end: done.append(start), 4, 1 << 20)
    os._exit(0 if len(done) == 8 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.exhaustive
def test_a_fork_has_threads_of_its_own() -> None:
    words = [sys.executable, "-W", "ignore", "-c", _FORKING]
    assert subprocess.run(words, timeout=60).returncode == 0

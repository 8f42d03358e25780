"""How threads wait: limited spinning before torch is loaded, and sleep while other processes compute."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch

from offspec.core.openmp import VARIABLES, limit_spinning, spinning_warning
from offspec.model import cpu_contention as module
from offspec.model.cpu_contention import CpuContention

SECOND = 1_000_000_000


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Set two threads, as torch has outside of tests: a single thread never waits for another."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(code: str, *arguments: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "OMP_NUM_THREADS")}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


TAKEN = """
import os, sys
def taken():
    print([os.environ.pop(name, None) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")])
"""
COMMAND = """
import bench
taken()
from offspec.ui.cli.main import main
sys.argv = ["offspec", "--version"]
try:
    main()
except SystemExit:
    taken()
"""


@pytest.mark.parametrize(
    "code", [COMMAND, pytest.param("import offspec; offspec.load; taken()", marks=pytest.mark.exhaustive)]
)
def test_spinning_is_limited_before_torch_is_loaded(code: str) -> None:
    said = [line for line in run(TAKEN + code).splitlines() if line.startswith("[")]
    assert said == [str(list(VARIABLES.values()))] * code.count("taken()")


def test_wait_policy_of_the_environment_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    limit_spinning()
    assert not VARIABLES.keys() & os.environ.keys(), "torch was loaded already"
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ and os.environ["OMP_WAIT_POLICY"] == "passive"


@pytest.mark.exhaustive
def test_torch_loaded_first_is_reported(tmp_path: Path) -> None:
    code = """
import sys, torch, os, offspec
def tell(event):
    if isinstance(event, offspec.Notice) and "spin" in event.text:
        print(event.text)
try:
    offspec.load(sys.argv[1], device="cpu", notify=tell)
except offspec.ModelNotFoundError:
    print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
    notice, variables = run(code, str(tmp_path / "nowhere"), OMP_NUM_THREADS="2").splitlines()
    assert "GOMP_SPINCOUNT=100000 OMP_WAIT_POLICY=active" in notice and variables == "None None"


@pytest.mark.usefixtures("two_threads")
def test_no_report_if_threads_sleep_or_are_single(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert spinning_warning() is not None
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert spinning_warning() is None
    monkeypatch.delenv("OMP_WAIT_POLICY")
    torch.set_num_threads(1)
    assert spinning_warning() is None


@pytest.mark.usefixtures("two_threads")
def test_threads_sleep_while_this_process_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each check comes a tenth of a second of work after the last, with this percentage spent waiting."""
    now, waited = 0, 0
    monkeypatch.setattr(module, "_now", lambda: (now, waited))
    monkeypatch.setattr(module, "perf_counter_ns", lambda: now)
    contention = CpuContention()

    def work(*percents: int) -> str:
        nonlocal now, waited
        told = ""
        for percent in percents:
            now, waited = now + SECOND // 10, waited + percent * SECOND // 1000
            contention.poll()
            told += "sleep " if contention.busy else "spin "
            now, waited = now + SECOND // 100, waited + SECOND // 100
            contention.poll()  # too early to decide
            now, waited = now - SECOND // 100, waited - SECOND // 100
        return told.strip()

    assert work(0, 8, 50, 8) == "spin spin spin spin", "a program that began and ended"
    assert work(50, 50) == "spin sleep"
    assert work(50, 2, 2, 2, 2) == "sleep sleep sleep sleep spin", "after half a second they spin"
    assert work(20, 30, 30) == "spin spin sleep"
    assert work(*[9] * 10) == "sleep " * 9 + "spin", "soon busy again: twice as long"
    assert work(*[9] * 5, 50, 50) == "spin " * 6 + "sleep"
    assert work(*[50] * 5) == "sleep " * 4 + "spin", "it was idle for a while"
    slept = [len(list(takewhile(lambda _: work(50) == "sleep", count()))) for _ in range(6)]
    assert slept == [10, 20, 40, 80, 160, 160], "a machine that stays busy is tried ever more rarely"
    contention.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Times seen by the checks, and the thread's waiting time: (0, 0) plus what a test adds."""
    times = [(0, 0)]
    seen = iter(times)
    monkeypatch.setattr(module, "_now", lambda: next(seen))
    monkeypatch.setattr(module, "_WINDOW", 0)
    return times


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("before", [0, 90])
def test_time_between_answers_is_ignored(before: int, clock: list[tuple[int, int]]) -> None:
    waited, during = before * SECOND, 0 if before else SECOND
    clock += [(90 * SECOND, waited)]
    clock += [((90 + looks) * SECOND, waited + looks * during) for looks in (1, 2)]
    contention = CpuContention()
    contention.begin()
    contention.poll()
    contention.poll()
    assert contention.busy == bool(during)
    contention.close()


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("threads", [1, 2])
def test_waiting_for_a_processor_is_detected_without_leftover_threads(
    threads: int, clock: list[tuple[int, int]]
) -> None:
    clock += [(SECOND, SECOND), (2 * SECOND, 2 * SECOND)]
    torch.set_num_threads(threads)
    before = set(threading.enumerate())
    contention = CpuContention()
    contention.poll()
    contention.poll()
    held = set(threading.enumerate()) - before
    assert contention.was_busy and contention.busy == (threads > 1) and len(held) == threads - 1
    contention.close()
    for thread in held:
        thread.join(60)
    assert not contention.busy and set(threading.enumerate()) <= before

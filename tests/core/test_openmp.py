"""How threads wait: limited before torch is loaded, and asleep while other processes compute."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

import pytest
import torch

from offspec.core.openmp import VARIABLES, unlimited_spinning
from offspec.model import contention as module
from offspec.model.contention import Contention
from tests.support.products import some

SECOND = 1_000_000_000
LIMITED = " ".join(VARIABLES.values())


@pytest.fixture
def two_threads() -> Iterator[None]:
    """As torch has them outside of tests: a single thread waits for no other."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(code: str, *arguments: str, **variables: str) -> str:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    ran = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=kept | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


@pytest.mark.parametrize(
    ("first", "policy"),
    some(
        [
            (first, policy)
            for first in ("import offspec; offspec.load", "import bench")
            for policy in (None, "passive")
        ],
        ("import bench", None),
        ("import bench", "passive"),
    ),
)
def test_spinning_is_limited_before_torch_is_loaded(first: str, policy: str | None) -> None:
    code = f"{first}; import os; print(os.environ.get('GOMP_SPINCOUNT'), os.environ.get('OMP_WAIT_POLICY'))"
    variables = {"OMP_WAIT_POLICY": policy} if policy else {}
    assert run(code, **variables) == ("None passive" if policy else LIMITED)


def test_the_command_limits_spinning() -> None:
    code = """
import os, sys
from offspec.ui.cli.main import main
sys.argv = ["offspec", "--version"]
try:
    main()
except SystemExit:
    print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
    assert run(code).splitlines()[-1] == LIMITED


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", some(["first", "later"], "first"))
def test_torch_that_came_first_is_told(order: str, tmp_path: Path) -> None:
    """As loading begins: there need not be a model."""
    code = """
import sys
if sys.argv[2] == "first":
    import torch
import os
import offspec
def tell(event):
    if isinstance(event, offspec.Notice) and "spin" in event.text:
        print(event.text)
try:
    offspec.load(sys.argv[1], device="cpu", notify=tell)
except offspec.ModelNotFoundError:
    pass
else:
    print("there was a model")
print(os.environ.get("GOMP_SPINCOUNT"), os.environ.get("OMP_WAIT_POLICY"))
"""
    *notices, variables = run(code, str(tmp_path / "nowhere"), order, OMP_NUM_THREADS="2").splitlines()
    if order == "first":
        assert (
            len(notices) == 1
            and "GOMP_SPINCOUNT=100000 OMP_WAIT_POLICY=active" in notices[0]
            and variables == "None None"
        )
    else:
        assert not notices and variables == LIMITED


@pytest.mark.usefixtures("two_threads")
def test_nothing_is_told_where_threads_sleep_or_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert unlimited_spinning() is not None
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert unlimited_spinning() is None
    monkeypatch.delenv("OMP_WAIT_POLICY")
    torch.set_num_threads(1)
    assert unlimited_spinning() is None


@pytest.mark.usefixtures("two_threads")
def test_threads_sleep_while_this_process_waits_for_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is a tenth of a second of work after the last, and so many percent of it were waiting."""
    now, waited = 0, 0
    monkeypatch.setattr(module, "_now", lambda: (now, waited))
    monkeypatch.setattr(module, "perf_counter_ns", lambda: now)
    contention = Contention()

    def work(*percents: int) -> str:
        nonlocal now, waited
        told = ""
        for percent in percents:
            now, waited = now + SECOND // 10, waited + percent * SECOND // 1000
            contention.look()
            told += "sleep " if contention.busy else "spin "
            now, waited = now + SECOND // 100, waited + SECOND // 100
            contention.look()  # too soon to tell
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


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("before", [0, 90])
def test_time_between_answers_says_nothing(before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not another thread waited then."""
    waited = before * SECOND
    during = 0 if before else SECOND
    later = (waited + during, waited + 2 * during)
    times = iter([(0, 0), (90 * SECOND, waited), (91 * SECOND, later[0]), (92 * SECOND, later[1])])
    monkeypatch.setattr(module, "_now", lambda: next(times))
    monkeypatch.setattr(module, "_WINDOW", 0)
    contention = Contention()
    contention.begin()
    contention.look()
    contention.look()
    assert contention.busy == bool(during)
    contention.close()


@pytest.mark.usefixtures("two_threads")
def test_one_thread_sees_as_well_that_others_take_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0, 0), (SECOND, SECOND), (2 * SECOND, 2 * SECOND)])
    monkeypatch.setattr(module, "_now", lambda: next(times))
    monkeypatch.setattr(module, "_WINDOW", 0)
    torch.set_num_threads(1)
    contention = Contention()
    contention.look()
    contention.look()
    assert contention.seen and not contention.busy


@pytest.mark.usefixtures("two_threads")
def test_no_thread_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(0, 0), (SECOND, SECOND), (2 * SECOND, 2 * SECOND)])
    monkeypatch.setattr(module, "_now", lambda: next(times))
    monkeypatch.setattr(module, "_WINDOW", 0)
    before = set(threading.enumerate())
    contention = Contention()
    contention.look()
    contention.look()
    held = set(threading.enumerate()) - before
    assert contention.busy and len(held) == 1
    contention.close()
    for thread in held:
        thread.join(10)
    assert not contention.busy and set(threading.enumerate()) <= before

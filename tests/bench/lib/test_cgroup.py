"""Memory groups, and processes that run in them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lib import cgroup, process
from bench.lib.cgroup import BenchError, MemoryCgroup
from tests.support.waiting import until


@pytest.fixture
def group() -> Iterator[MemoryCgroup]:
    try:
        made = MemoryCgroup(150_000_000).__enter__()
    except BenchError as error:
        pytest.skip(str(error))
    yield made
    made.__exit__(None, None, None)
    assert not made.folder.exists()


def test_cgroup_measures_the_program(group: MemoryCgroup, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    code = f"""
import os, time
x = bytearray(60_000_000)
while not os.path.exists({str(seen)!r}):
    time.sleep(0.01)
print("done")
"""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(group.run, [sys.executable, "-S", "-c", code])
        try:
            until(lambda: running.done() or group._anon_peak > 60_000_000)
        finally:
            seen.touch()
        assert running.result() == "done\n"
    assert 60_000_000 < group.use.peak <= 150_000_000
    assert 60_000_000 < group.use.anon_peak <= group.use.peak
    assert group.use.oom_kills == 0


def test_cgroup_tells_of_a_program_over_the_limit(group: MemoryCgroup) -> None:
    with pytest.raises(BenchError, match="needed more than"):
        group.run([sys.executable, "-S", "-c", "x = bytearray(400_000_000)"])


def test_cgroup_tells_of_a_program_that_fails(group: MemoryCgroup) -> None:
    with pytest.raises(BenchError, match="exit code 3"):
        group.run([sys.executable, "-S", "-c", "raise SystemExit(3)"])


def test_no_right_to_make_a_group_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.limit_in_bytes").write_text("1")
    monkeypatch.setattr(cgroup, "_V1", tmp_path)
    monkeypatch.setattr(cgroup, "_own_group", lambda version: "")

    def refuse(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(BenchError, match="--no-cgroup"):
        MemoryCgroup(1 << 20).__enter__()


def test_measured_processes_run_in_the_group_with_caches_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Group(SimpleNamespace):
        use = cgroup.MemoryUse(100, 90, 80, 0)

        def __enter__(self) -> Group:
            return self

        def __exit__(self, *error: object) -> None:
            calls.append("removed")

        def run(self, argv: list[str], *, cwd: Path) -> str:
            calls.append(argv)
            return 'noise\n{"found": 1}\n'

    def make(limit: int) -> Group:
        calls.append(limit)
        return Group()

    monkeypatch.setattr(process, "MemoryCgroup", make)
    monkeypatch.setattr(process, "drop_caches", lambda: calls.append("dropped"))
    args = argparse.Namespace(keep_caches=False, no_cgroup=False, memory="1.5GB")
    peaks = {"cgroup_peak_bytes": 90, "cgroup_anon_peak_bytes": 80}
    assert process.measured(args, ["true"], 100) == ('{"found": 1}', peaks)
    assert calls == ["dropped", 100, ["true"], "removed"]
    assert process.measured_job(args, "module", {"a": 1}) == {"found": 1, **peaks}
    assert calls[5:7] == [1_500_000_000, [sys.executable, "-m", "module", '{"a": 1}']]
    free = argparse.Namespace(keep_caches=True, no_cgroup=True)
    assert process.measured(free, ["echo", "{}"]) == ("{}", {})
    with pytest.raises(BenchError, match="exit code 1"):
        process.measured(free, ["false"])

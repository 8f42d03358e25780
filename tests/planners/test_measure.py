"""Measurements: what is read and multiplied, and in which order; no figure is expected of any machine."""

import os
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from offspec_planners import measure as package
from offspec_planners.hardware_rates import Hardware
from offspec_planners.measure import identify, measure
from offspec_planners.measure.disk import RawDisk, read_bandwidth
from offspec_planners.measure.processor import copy_bandwidth
from tests.support.simulated_cuda import is_simulated


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "ab"]
    for file in made:
        file.write_bytes(os.urandom(20_000))
    return made


def test_reading_starts_at_the_offset_and_wraps_around(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[tuple[str, int]]()
    names = dict[int, str]()
    opened, read = os.open, os.preadv

    def noted_open(path: Path, flags: int) -> int:
        fd = opened(path, flags)
        names[fd] = Path(path).name
        return fd

    def noted_read(fd: int, buffers: list[memoryview], offset: int) -> int:
        seen.append((names[fd], offset))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "preadv", noted_read)
    found = read_bandwidth(files, limit_bytes=12_288, threads=1, block=4096, start=8 * 4096)
    assert seen == [("b", 12_288), ("b", 16_384), ("a", 0)]
    assert found.nbytes == 4096 + 20_000 - 16_384 + 4096


def test_reading_ends_after_its_time(files: list[Path]) -> None:
    assert read_bandwidth(files, limit_bytes=1 << 40, block=4096, seconds=-1.0).nbytes == 0


def test_thread_errors_reach_the_caller(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output"):
        read_bandwidth(files, limit_bytes=4096)


def test_interrupted_reading_leaves_no_thread(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(future: Future[object]) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "result", interrupted)
    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        read_bandwidth(files, limit_bytes=1 << 40, block=4096)
    assert set(threading.enumerate()) <= before


def test_machine_is_measured_part_by_part(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_SIDE", 64)
    monkeypatch.setattr(package, "_SECONDS", 0.001)
    told = list[tuple[str, int, int]]()
    found = measure(files, progress=lambda what, done, total: told.append((what, done, total)))
    assert [what for what, *_ in told] == ["disk", "memory", "products", "launches", "done"]
    assert [done for _, done, _ in told] == [0, 1, 2, 3, 4]
    assert {total for *_, total in told} == {4}
    assert found.link is None and found.sources == ()
    assert found.fingerprint() == identify().fingerprint() and 0 < found.processor.layer_overhead < 1
    for rate in (found.disk, found.processor.bandwidth):
        assert 0 < rate.low <= rate.value <= rate.high
    assert found.processor.memory == found.ram
    assert [rows for rows, _ in found.processor.gemm] == [1, 4, 16, 64, 256, 1024]
    assert Hardware.from_json(found.to_json()) == found
    raw = RawDisk(files, 4096, (1, 4096))
    assert raw.read() > 0 and raw.sweep == {}


def test_threads_and_wait_policy_change_the_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    three = identify()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    spinning = identify()
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    found = identify()
    assert len({machine.fingerprint() for machine in (three, spinning, found)}) == 3
    assert "GOMP_SPINCOUNT=77" in found.processor
    assert found.name == spinning.name and "GOMP" not in found.name  # the heading of every page
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "77" not in identify().processor, "one thread waits for nobody"


def test_torch_is_loaded_only_when_measuring() -> None:
    code = "import sys, offspec_planners.measure.gpu; print('torch' in sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(package.__file__).parents[2])},
    )
    assert shown.stdout == "False\n"


@pytest.mark.gpu
@pytest.mark.skipif(is_simulated(), reason="a simulated device has no clock")
def test_device_is_measured_with_its_link(files: list[Path]) -> None:
    found = measure(files, "cuda")
    assert found.link is not None and found.link.value > 1e9
    assert found.processor.memory != found.ram
    assert copy_bandwidth().high >= found.link.low / 2

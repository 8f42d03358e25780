"""Runs that are killed, interrupted, or fail, and those that come after them."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.core.cache_dir import claim_folder
from offspec.core.errors import CheckpointError, DiskFullError, ModelNotFoundError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.model.quantize.pack import verify_pack
from tests.model.quantize.stage import Bench, flip

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive
def test_a_killed_run_is_taken_up(bench: Bench, tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from offspec.model.quantize.pack import pack_model\n"
        "def notify(event):\n"
        "    if getattr(event, 'detail', '').startswith('layer 2 '):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "pack_model(sys.argv[1], 'nf4', out=__import__('pathlib').Path(sys.argv[2]), notify=notify)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(bench.model), str(bench.out)], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    assert bench.left() == [".pack.lock", ".pack.packing"]
    assert list((bench.out.parent / ".pack.packing").glob(".*.partial"))
    pack = bench.pack()
    assert pack.kept == 2 and pack.files == 4
    assert "2 of 4 files were finished before and are kept" in bench.said
    assert bench.left() == ["pack"]
    bench.pack(out=tmp_path / "whole")
    assert bench.content() == bench.content(tmp_path / "whole")


def test_an_interrupt_keeps_what_is_finished(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=bench.stopping(3, KeyboardInterrupt()))
    assert "3 of 4 files are finished and kept: the same command goes on from there" in bench.said
    assert not bench.out.exists()
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(str(bench.out.parent / ".pack.packing"))
    assert bench.pack().kept == 3


def test_an_interrupt_before_anything_is_finished_leaves_nothing(bench: Bench) -> None:
    def notify(event: Event) -> None:
        if isinstance(event, LoadProgress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=notify)
    assert bench.left() == []


def test_a_finished_file_that_was_damaged_meanwhile_is_made_again(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=bench.stopping(3, KeyboardInterrupt()))
    flip(bench.out.parent / ".pack.packing" / "model-layer-0000.safetensors")
    assert bench.pack().kept == 2
    verify_pack(bench.out, bench.events.append)


def test_what_was_begun_in_another_format_is_dropped(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.pack("int8", notify=bench.stopping(3, KeyboardInterrupt()))
    pack = bench.pack("nf4")
    assert pack.kept == 0 and "in int8" in bench.said
    verify_pack(bench.out, bench.events.append)


def test_what_was_begun_of_another_source_is_dropped(bench: Bench, tmp_path: Path) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))
    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=bench.stopping(3, KeyboardInterrupt()))
    os.utime(bench.model / "model.safetensors", (1, 1))
    assert bench.pack().kept == 0


def test_what_was_begun_and_cannot_be_read_is_begun_anew(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=bench.stopping(3, KeyboardInterrupt()))
    (bench.out.parent / ".pack.packing" / MANIFEST).write_text("{")
    assert bench.pack().kept == 0 and "begun anew" in bench.said


@pytest.mark.parametrize("after", [0, 30, 60])
def test_a_disk_that_fills_up(bench: Bench, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write, calls = os.write, iter(range(10**6))

    def full(fd: int, data: bytes) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match="make room"):
        bench.pack()
    assert not bench.out.exists()
    monkeypatch.undo()
    assert (bench.pack().kept > 0) == (after > 0)
    verify_pack(bench.out, bench.events.append)


def test_a_disk_too_small_is_known_beforehand(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(bench.out.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(DiskFullError, match=r"packing .*tiny to nf4 needs .* `out`"):
        bench.pack()
    assert bench.left() == []
    assert not any(isinstance(event, LoadProgress) for event in bench.events)


def test_a_source_that_changes_meanwhile(bench: Bench, tmp_path: Path) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))

    def notify(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.detail.startswith("layer 2 "):
            os.utime(bench.model / "model.safetensors", (1, 1))

    with pytest.raises(CheckpointError, match="changed while it was packed"):
        bench.pack(notify=notify)
    assert bench.left() == []


def test_a_source_that_is_cut_short_meanwhile(bench: Bench, tmp_path: Path) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))

    def notify(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.detail.startswith("layer 1 "):
            os.truncate(bench.model / "model.safetensors", 10_000)

    with pytest.raises(CheckpointError, match="changed while it was read"):
        bench.pack(notify=notify)


def test_the_second_of_two_waits(bench: Bench) -> None:
    waits = threading.Event()

    def notify(event: Event) -> None:
        if isinstance(event, Notice) and "another process" in event.text:
            waits.set()

    thread = threading.Thread(target=lambda: bench.pack(notify=notify))
    with claim_folder(bench.out, lambda: None):
        thread.start()
        assert waits.wait(20) and not bench.out.exists()
    thread.join()
    assert bench.pack().kept == 4

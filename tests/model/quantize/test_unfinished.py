"""Runs that are killed, interrupted or fail, and later runs."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.core.cache_dir import lock_folder
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError, DiskFullError, ModelNotFoundError
from offspec.core.events import Event, LoadProgress, Notice
from offspec.model.quantize.pack import verify_pack
from tests.model.quantize.stage import Bench, flip

ROOT = Path(__file__).parents[3]


@pytest.fixture
def bench(bench: Bench, tmp_path: Path) -> Bench:
    """A bench with its own model, which tests may change."""
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "copy"))
    return bench


def _interrupt(bench: Bench, to: PackFormat = "nf4") -> Path:
    """Interrupt after three of four files; return their folder."""
    with pytest.raises(KeyboardInterrupt):
        bench.pack(to, notify=bench.stopping(3, KeyboardInterrupt()))
    return bench.out.parent / ".pack.packing"


@pytest.mark.exhaustive
def test_a_killed_run_is_resumed(bench: Bench, tmp_path: Path) -> None:
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
    assert "2 of 4 files were finished before and are kept" in bench.messages
    assert bench.left() == ["pack"]
    bench.pack(out=tmp_path / "whole")
    assert bench.content() == bench.content(tmp_path / "whole")


def test_an_interrupt_keeps_finished_files(bench: Bench) -> None:
    partial = _interrupt(bench)
    assert "3 of 4 files are finished and kept; the same command resumes from there" in bench.messages
    assert not bench.out.exists()
    with pytest.raises(ModelNotFoundError):
        open_checkpoint(str(partial))
    assert bench.pack().kept == 3


def test_an_interrupt_before_the_first_file_leaves_nothing(bench: Bench) -> None:
    def notify(event: Event) -> None:
        if isinstance(event, LoadProgress):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.pack(notify=notify)
    assert bench.left() == []


@pytest.mark.parametrize(
    ("spoil", "kept", "message"),
    [
        (lambda partial, model: flip(partial / "model-layer-0000.safetensors"), 2, ""),
        (lambda partial, model: os.utime(model / "model.safetensors", (1, 1)), 0, ""),
        (lambda partial, model: (partial / MANIFEST).write_text("{"), 0, "starting again"),
    ],
    ids=["a finished file is damaged", "the source is another", "the manifest cannot be read"],
)
def test_a_partial_pack_of_changed_files_is_made_again(
    bench: Bench, spoil: Callable[[Path, Path], object], kept: int, message: str
) -> None:
    partial = _interrupt(bench)
    (partial / "old.json").write_text("{}")
    spoil(partial, bench.model)
    assert bench.pack().kept == kept and message in bench.messages
    assert kept or "old.json" not in bench.content()
    verify_pack(bench.out, bench.events.append)


def test_a_partial_pack_in_another_format_is_discarded(bench: Bench) -> None:
    _interrupt(bench, "int8")
    assert bench.pack("nf4").kept == 0 and "in int8" in bench.messages
    verify_pack(bench.out, bench.events.append)


@pytest.mark.parametrize("after", [0, 30, 60])
def test_a_full_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    write, calls = os.write, iter(range(10**6))

    def full(fd: int, data: bytes) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match="free some space"):
        bench.pack()
    assert not bench.out.exists()
    monkeypatch.undo()
    assert (bench.pack().kept > 0) == (after > 0)
    verify_pack(bench.out, bench.events.append)


@pytest.mark.parametrize(
    ("layer", "change", "why"),
    [
        (2, lambda file: os.utime(file, (1, 1)), "changed while it was packed"),
        (1, lambda file: os.truncate(file, 10_000), "changed while it was read"),
    ],
)
def test_a_source_that_changes_during_packing(
    bench: Bench, layer: int, change: Callable[[Path], None], why: str
) -> None:
    def notify(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.detail.startswith(f"layer {layer} "):
            change(bench.model / "model.safetensors")

    with pytest.raises(CheckpointError, match=why):
        bench.pack(notify=notify)
    assert not bench.out.exists() and (layer == 1 or bench.left() == [])


def test_a_second_process_waits(bench: Bench) -> None:
    waits = threading.Event()

    def notify(event: Event) -> None:
        if isinstance(event, Notice) and "another process" in event.text:
            waits.set()

    thread = threading.Thread(target=lambda: bench.pack(notify=notify))
    with lock_folder(bench.out, lambda: None):
        thread.start()
        assert waits.wait(120) and not bench.out.exists()
    thread.join()
    assert bench.pack().kept == 4

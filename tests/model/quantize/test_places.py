"""Locations of packs, and folders that are never overwritten."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.core import files
from offspec.core.config import EngineConfig
from offspec.core.errors import CheckpointError, DiskFullError, RequestError, UnsupportedModelError
from offspec.model.quantize.pack import pack_model, packed_model, verify_pack
from tests.model.quantize.stage import Bench
from tests.support.tiny_models import write_model


@pytest.mark.parametrize("name", ["\u30e2\u30c7\u30eb\u30007B", "\U0001f469\u200d\U0001f680", "\udcff"])
def test_a_model_with_an_unprintable_name(bench: Bench, tmp_path: Path, name: str) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / name))
    bench.pack()
    assert open_checkpoint(str(bench.out)).nbytes
    assert bench.pack().kept == 4
    with pytest.raises(RequestError, match="already has a pack of") as caught:
        bench.pack("int8")
    assert str(caught.value).isprintable()


def test_symbolic_links(bench: Bench, tmp_path: Path) -> None:
    """Links to an empty folder, and to nothing."""
    for place in (tmp_path / "real", tmp_path / "nowhere"):
        bench.out = bench.out.parent / place.name
        bench.out.symlink_to(place)
        if place.name == "real":
            place.mkdir()
        assert bench.pack().folder == place
        assert bench.out.is_symlink() and bench.pack().kept == 4
        verify_pack(place, bench.events.append)


def test_unusable_locations_are_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, file, disk = (bench.out.parent / name for name in ("loop", "file", "disk"))
    loop.symlink_to(loop)
    file.write_text("mine")
    disk.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path in (Path("/"), disk))
    refused: list[tuple[Path, type[Exception], str]] = [
        (loop, CheckpointError, "cannot read the folder"),
        (file, RequestError, "is not a folder"),
        (file / "pack", CheckpointError, "use another folder with `out`"),
        (bench.model, RequestError, "exists and is not a pack"),
        (Path("/"), RequestError, "`out` / is the root of a disk; use a folder in it"),
        (disk, RequestError, "the root of a disk"),
    ]
    if Path("/proc/self").is_dir():
        refused.append(
            (Path("/proc/x"), CheckpointError, r"cannot write to /proc .*use another folder with `out`")
        )
    for out, error, why in refused:
        with pytest.raises(error, match=why):
            bench.pack(out=out)
    assert file.read_text() == "mine" and bench.left() == ["disk", "file", "loop"]


def test_free_space_is_checked_in_the_target_folder(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked in advance."""
    (tmp_path / "real").mkdir()
    bench.out.symlink_to(tmp_path / "real" / "pack")
    usage = shutil.disk_usage(tmp_path)
    free = {tmp_path / "real": 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.get(path, 2**50)))
    with pytest.raises(
        DiskFullError, match=f"packing .*tiny to nf4 needs .* in {tmp_path / 'real'}, but only"
    ):
        bench.pack()
    assert bench.left() == ["pack"] and not any((tmp_path / "real").iterdir())


def test_a_renamed_model_finds_its_pack(bench: Bench, tmp_path: Path) -> None:
    first = packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path).folder
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "renamed"))
    bench.events.clear()
    assert packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path).folder == first
    assert not bench.events


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value.update(version=2), "version is 2.*: remove"),
        (dict.clear, 'no "version"'),
        (lambda value: value.update(fingerprint="0" * 64), "remove this one"),
    ],
)
def test_a_possible_other_pack_is_not_changed(
    bench: Bench, change: Callable[[dict[str, Any]], None], why: str
) -> None:
    bench.pack()
    value = json.loads((bench.out / MANIFEST).read_text())
    change(value)
    (bench.out / MANIFEST).write_text(json.dumps(value))
    before = bench.content()
    with pytest.raises(RequestError, match=why):
        bench.pack()
    assert bench.content() == before and bench.left() == ["pack"]


def test_a_temporarily_unreadable_manifest(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.pack()
    opened = files.open_regular

    def failing(path: Path | str, flags: int = 0) -> int:
        if Path(path).name == MANIFEST:
            raise OSError(errno.EIO, "Input/output error")
        return opened(path, flags)

    before = bench.content()
    with monkeypatch.context() as patch:
        patch.setattr(files, "open_regular", failing)
        with pytest.raises(RequestError, match="Input/output error"):
            bench.pack()
    assert bench.content() == before and bench.left() == ["pack"]


def test_the_error_names_the_failed_operation(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, rename = Path.iterdir, os.rename
    last = bench.out.parent / ".pack.packing" / "model-layer-0002.safetensors"

    def unlisted(path: Path) -> Any:
        if path == bench.model and last.exists():
            raise OSError(errno.EIO, "Input/output error")
        return listed(path)

    def unnamed(old: Path, new: Path) -> None:
        if new == bench.out:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(old, new)

    with pytest.raises(BrokenPipeError):  # an error of the listener, not of a file
        bench.pack(notify=bench.stopping(1, BrokenPipeError(errno.EPIPE, "Broken pipe")))
    monkeypatch.setattr(Path, "iterdir", unlisted)
    with pytest.raises(CheckpointError, match=f"cannot read the folder {bench.model}: Input/output error"):
        bench.pack()
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", unnamed)
    with pytest.raises(CheckpointError, match=f"cannot write to {bench.out.parent} .Device or resource busy"):
        bench.pack()
    monkeypatch.undo()
    assert bench.pack().kept == 4


def test_impossible_requests(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"quantize must be one of nf4, .* not 'nf3'"):
        EngineConfig("model", quantize="nf3")
    with pytest.raises(UnsupportedModelError, match="no matrix of its layers"):
        pack_model(str(write_model(tmp_path / "narrow")), "nf4", out=tmp_path / "pack")
    bench.out.mkdir()
    assert bench.pack().kept == 0, "an empty folder counts as missing"
    with pytest.raises(RequestError, match=r"already has a pack of .* in nf4"):
        bench.pack("int8")
    with pytest.raises(UnsupportedModelError, match="is quantized already"):
        pack_model(str(bench.out), "int8", out=tmp_path / "twice")

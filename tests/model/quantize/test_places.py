"""Where a pack may be made, and what is never written over."""

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
from offspec.core.errors import CheckpointError, DiskFullError, RequestError
from offspec.model.quantize.pack import packed_model, verify_pack
from tests.model.quantize.stage import Bench


@pytest.mark.parametrize(
    "name", ["\u30e2\u30c7\u30eb\u30007B", "a\u00a0b", "\U0001f469\u200d\U0001f680", "\udcff"]
)
def test_a_model_whose_name_does_not_print(bench: Bench, tmp_path: Path, name: str) -> None:
    bench.model = Path(shutil.copytree(bench.model, tmp_path / name))
    bench.pack()
    assert open_checkpoint(str(bench.out)).nbytes
    assert bench.pack().kept == 4
    with pytest.raises(RequestError, match="holds a pack of") as caught:
        bench.pack("int8")
    assert str(caught.value).isprintable()


def test_a_link_to_an_empty_folder(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    bench.out.symlink_to(tmp_path / "real")
    assert bench.pack().folder == tmp_path / "real"
    assert bench.out.is_symlink() and bench.pack().kept == 4


def test_a_link_to_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.out.symlink_to(tmp_path / "nowhere")
    bench.pack()
    verify_pack(tmp_path / "nowhere", bench.events.append)


def test_a_link_to_itself(bench: Bench) -> None:
    bench.out.symlink_to(bench.out)
    with pytest.raises(CheckpointError, match="cannot read the folder"):
        bench.pack()


def test_a_file(bench: Bench) -> None:
    bench.out.write_text("mine")
    with pytest.raises(RequestError, match="is no folder"):
        bench.pack()


def test_the_root_of_a_disk(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="`out` / is the root of a disk: name a folder in it"):
        bench.pack(out=Path("/"))
    bench.out.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == bench.out)
    with pytest.raises(RequestError, match="the root of a disk"):
        bench.pack()
    assert bench.left() == ["pack"]


def test_the_room_is_that_of_the_folder_it_goes_to(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    bench.out.symlink_to(tmp_path / "real" / "pack")
    usage = shutil.disk_usage(tmp_path)
    free = {tmp_path / "real": 2**20}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.get(path, 2**50)))
    with pytest.raises(DiskFullError, match=f"in {tmp_path / 'real'}, where"):
        bench.pack()


def test_a_renamed_model_finds_its_pack(bench: Bench, tmp_path: Path) -> None:
    first = packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path).folder
    bench.model = Path(shutil.copytree(bench.model, tmp_path / "renamed"))
    bench.events.clear()
    assert packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path).folder == first
    assert not bench.events


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="there is no /proc")
def test_a_folder_in_which_no_file_can_be_made(bench: Bench) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write to /proc \(.*name another folder by `out`"):
        bench.pack(out=Path("/proc/x"))


def _newer(value: dict[str, Any]) -> None:
    value.update(version=2)


def _of_another(value: dict[str, Any]) -> None:
    value.update(fingerprint="0" * 64)


@pytest.mark.parametrize(
    ("change", "why"),
    [(_newer, "version is 2.*: remove"), (dict.clear, 'no "version"'), (_of_another, "remove this one")],
)
def test_what_may_be_another_pack_is_left_as_it_is(
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


def test_a_manifest_that_cannot_be_read_now(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_pack_of_the_cache_without_a_manifest_is_made_anew(bench: Bench, tmp_path: Path) -> None:
    folder = packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path).folder
    before = bench.content(folder)
    for spoil in (Path.unlink, lambda file: file.write_text("{")):
        spoil(folder / MANIFEST)
        packed_model(str(bench.model), "nf4", bench.events.append, cache_dir=tmp_path)
        assert bench.content(folder) == before


def test_what_was_begun_and_cannot_be_read_is_cleared(bench: Bench) -> None:
    begun = bench.out.parent / ".pack.packing"
    begun.mkdir()
    (begun / MANIFEST).write_text("{")
    (begun / "old.json").write_text("{}")
    bench.pack()
    assert "old.json" not in bench.content()


def test_the_error_names_what_failed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    listed, rename = Path.iterdir, os.rename

    def unlisted(path: Path) -> Any:
        if (
            path == bench.model
            and (bench.out.parent / ".pack.packing" / "model-layer-0002.safetensors").exists()
        ):
            raise OSError(errno.EIO, "Input/output error")
        return listed(path)

    def unnamed(old: Path, new: Path) -> None:
        if new == bench.out:
            raise OSError(errno.EBUSY, "Device or resource busy")
        rename(old, new)

    monkeypatch.setattr(Path, "iterdir", unlisted)
    with pytest.raises(CheckpointError, match=f"cannot read the folder {bench.model}: Input/output error"):
        bench.pack()
    monkeypatch.undo()
    monkeypatch.setattr(os, "rename", unnamed)
    with pytest.raises(CheckpointError, match=f"cannot write to {bench.out.parent} .Device or resource busy"):
        bench.pack()
    monkeypatch.undo()
    assert bench.pack().kept == 4


def test_a_failure_to_tell_is_no_failure_to_write(bench: Bench) -> None:
    with pytest.raises(BrokenPipeError):
        bench.pack(notify=bench.stopping(1, BrokenPipeError(errno.EPIPE, "Broken pipe")))

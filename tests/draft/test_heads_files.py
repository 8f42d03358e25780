"""Files of a head: reading them, and errors for damaged or hostile ones.
A pickle with anything other than tensors is not opened, nor one that takes too much memory.
"""

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offspec.checkpoint.rows import row_blocks
from offspec.core.errors import CheckpointError, DraftError, HeaderError, MissingTensorError
from offspec.draft.heads import files as heads_files
from offspec.draft.heads import pickles
from offspec.draft.heads.files import HeadFiles, open_files
from tests.support.heads_files import (
    MEDUSA_CONFIG,
    Tensors,
    medusa_tensors,
    mlp_config,
    mlp_tensors,
    open_for_tiny,
    opening_fails,
    write_head,
)


def stored(path: Path) -> HeadFiles:
    files = open_files(path, str(path))
    assert files is not None
    return files


def read(files: HeadFiles, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return files.weight(name, dtype, torch.device("cpu")) if dtype.is_floating_point else files.integers(name)


def same(files: HeadFiles, tensors: Tensors) -> bool:
    return files.names == tensors.keys() and all(
        torch.equal(read(files, name, tensor.dtype), tensor) and files._dtype(name) == tensor.dtype
        for name, tensor in tensors.items()
    )


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "pytorch_model.bin", "x.pth"])
def test_open_by_folder_or_file(tmp_path: Path, file: str) -> None:
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in medusa_tensors().items()}
    write_head(tmp_path, MEDUSA_CONFIG, tensors, file)
    for path in (tmp_path, tmp_path / file):
        head = open_for_tiny(path)
        assert head is not None and head.kind == "medusa"
        assert stored(path).config == MEDUSA_CONFIG
        assert same(stored(path), tensors)
    (tmp_path / "config.json").unlink()
    head = open_for_tiny(tmp_path / file)
    assert head is not None and head.kind == "medusa", "a file needs no configuration"


def test_integers_scalars_legacy_format_and_parameters(tmp_path: Path) -> None:
    tensors = {"d2t": torch.arange(9), "one": torch.tensor(1.5), "none": torch.empty(0, 3)}
    assert same(stored(write_head(tmp_path / "plain", {}, tensors)), tensors)
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in medusa_tensors().items()}
    torch.save(parameters, tmp_path / "head.pt", _use_new_zipfile_serialization=False)
    files = stored(tmp_path / "head.pt")
    assert same(files, medusa_tensors()) and not read(files, "0.1.weight").requires_grad


@pytest.mark.parametrize("ending", [".safetensors", ".bin"])
def test_shards_with_an_index(tmp_path: Path, ending: str) -> None:
    tensors = mlp_tensors()
    names = ["model-1" + ending, "model-2" + ending]
    place = {name: names[index % 2] for index, name in enumerate(tensors)}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if place[name] == file}
        save_file(part, tmp_path / file) if ending == ".safetensors" else torch.save(part, tmp_path / file)
    (tmp_path / "config.json").write_text(json.dumps(mlp_config()))
    index = "model.safetensors" if ending == ".safetensors" else "pytorch_model.bin"
    (tmp_path / f"{index}.index.json").write_text(json.dumps({"weight_map": place}))
    assert same(stored(tmp_path), tensors)
    head = open_for_tiny(tmp_path)
    assert head is not None and head.kind == "mlp_speculator"
    (tmp_path / names[1]).unlink()
    assert isinstance(opening_fails(tmp_path), MissingTensorError)


@pytest.mark.parametrize("weight_map", [None, {}, {"a": 3}, {"a": "../model-1.bin"}])
def test_pickle_index_without_files(tmp_path: Path, weight_map: Any) -> None:
    write_head(tmp_path, MEDUSA_CONFIG, medusa_tensors(), "model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert isinstance(opening_fails(tmp_path), MissingTensorError)


def test_safetensors_take_precedence_and_training_files_are_ignored(tmp_path: Path) -> None:
    tensors = medusa_tensors()
    write_head(tmp_path, MEDUSA_CONFIG, {"other": torch.zeros(3)}, "medusa_lm_head.pt")
    write_head(tmp_path, MEDUSA_CONFIG, tensors, "medusa_lm_head.safetensors")
    assert same(stored(tmp_path), tensors)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    write_head(tmp_path, MEDUSA_CONFIG, tensors, "medusa_lm_head.pt")
    for name in ("optimizer.pt", "scheduler.pt", "training_args.bin", "rng_state.pth"):
        (tmp_path / name).write_bytes(b"?")
    assert same(stored(tmp_path), tensors)
    (tmp_path / "second.pt").write_bytes(b"?")
    assert "name the one that is the head" in str(opening_fails(tmp_path))
    assert open_for_tiny(tmp_path / "medusa_lm_head.pt") is not None


def damaged(data: bytes, way: str) -> bytes:
    return {
        "empty": b"",
        "a few bytes": data[:40],
        "half": data[: len(data) // 2],
        "its end is missing": data[:-30],
        "text": b"<html>not found</html>" * 9,
        "a pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n",
    }[way]


@pytest.mark.parametrize("way", ["empty", "a few bytes", "half", "its end is missing", "text", "a pointer"])
def test_damaged_files(tmp_path: Path, way: str) -> None:
    for kind in ("safetensors", "zip", "older"):
        path = tmp_path / ("head.safetensors" if kind == "safetensors" else f"{kind}.pt")
        if kind == "safetensors":
            save_file(medusa_tensors(), path)
        else:
            torch.save(medusa_tensors(), path, _use_new_zipfile_serialization=kind == "zip")
        path.write_bytes(damaged(path.read_bytes(), way))
        error = opening_fails(path)
        assert isinstance(error, CheckpointError | DraftError)
        assert "download it again" in str(error) or "git lfs pull" in str(error)


def test_file_truncated_after_opening(tmp_path: Path) -> None:
    files = stored(write_head(tmp_path, {}, medusa_tensors()))
    os.truncate(tmp_path / "model.safetensors", 2000)
    with pytest.raises(CheckpointError, match="cut short at the tensor"):
        for name in files.names:
            read(files, name)


@pytest.mark.parametrize("file", ["model.safetensors", "head.pt"])
def test_large_tensors_are_read_in_blocks(tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has the maximum size: 4 rows of 24 bytes, stored, or one row if that is larger."""
    tensors = {
        "plain": torch.randn(11, 12).half(),
        "turned": torch.randn(12, 11).half().T,
        "wide": torch.randn(3, 60).half(),
        "one": torch.tensor(2.0).half(),
    }
    if file == "model.safetensors":
        tensors["turned"] = tensors["turned"].contiguous()
    files = stored(write_head(tmp_path, {}, tensors, file))
    monkeypatch.setattr(heads_files, "BLOCK", 100)
    for name, rows in {"plain": [4, 4, 3], "turned": [4, 4, 3], "wide": [1, 1, 1], "one": [1]}.items():
        assert [len(block) for _, block in row_blocks(files._find(name), 100)] == rows
        assert torch.equal(read(files, name), tensors[name].float())
    part = torch.zeros(5, 12)
    files.fill("plain", part)
    assert torch.equal(part, tensors["plain"][:5].float())


def test_non_finite_values_are_found_in_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_files, "BLOCK", 16)
    large = torch.ones(9, 2)
    large[7, 1] = 1e6
    files = stored(write_head(tmp_path, {}, {"large": large}))
    assert torch.equal(read(files, "large"), large)
    with pytest.raises(CheckpointError, match=r"'large' has values that are not finite in torch\.float16"):
        read(files, "large", torch.float16)


@pytest.mark.parametrize("file", ["model.safetensors", "head.pt", "config.json"])
def test_special_files_do_not_block(tmp_path: Path, file: str) -> None:
    if file == "config.json":
        write_head(tmp_path, None, medusa_tensors())
    os.mkfifo(tmp_path / file)
    if file == "config.json":
        assert stored(tmp_path).config == {}
        (tmp_path / file).unlink()
        (tmp_path / file).write_text("{")
        assert isinstance(opening_fails(tmp_path), HeaderError)
    else:
        assert isinstance(opening_fails(tmp_path), MissingTensorError)


def test_fingerprint_depends_on_files_and_configuration(tmp_path: Path) -> None:
    def fingerprint() -> str:
        head = open_for_tiny(tmp_path)
        assert head is not None
        return head.fingerprint

    write_head(tmp_path, MEDUSA_CONFIG, medusa_tensors(), "medusa_lm_head.pt")
    first = fingerprint()
    assert fingerprint() == first
    os.utime(tmp_path / "medusa_lm_head.pt", ns=(1, 1))
    second = fingerprint()
    (tmp_path / "config.json").write_text(json.dumps({**MEDUSA_CONFIG, "more": 1}))
    assert len({first, second, fingerprint()}) == 3
    files = stored(tmp_path)
    (tmp_path / "medusa_lm_head.pt").unlink()
    with pytest.raises(MissingTensorError, match="is gone"):
        _ = files.fingerprint


class MaliciousPickle:
    """A malicious pickle: the default loader would create a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., int], tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_pickle_cannot_run_code(tmp_path: Path) -> None:
    mark = tmp_path / "it_ran"
    content = {**medusa_tensors(1), "more": MaliciousPickle(mark)}
    torch.save(content, tmp_path / "zipped.pt")
    torch.save(content, tmp_path / "older.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "bare.pt").write_bytes(pickle.dumps(MaliciousPickle(mark)))
    for file in ("zipped.pt", "older.pt", "bare.pt"):
        error = opening_fails(tmp_path / file)
        assert isinstance(error, DraftError)
        assert "run code" in str(error) and "convert it to safetensors" in str(error)
    assert not mark.exists()
    pickle.loads((tmp_path / "bare.pt").read_bytes())  # it would have
    assert mark.exists()


@pytest.mark.parametrize("part", ["data.pkl", "data/0"])
def test_zip_bomb(tmp_path: Path, part: str) -> None:
    torch.save(medusa_tensors(1), tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for entry in plain.infolist():
            packed = zipfile.ZIP_DEFLATED if entry.filename.endswith(part) else zipfile.ZIP_STORED
            bomb.writestr(entry.filename, plain.read(entry), packed)
    error = opening_fails(tmp_path / "bomb.pt")
    assert isinstance(error, DraftError) and part in str(error)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickles_that_need_too_much_memory_are_not_read(
    tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "_LARGEST_PICKLE" if zipped else "_LARGEST_OLDER", 100)
    torch.save(medusa_tensors(1), tmp_path / "head.pt", _use_new_zipfile_serialization=zipped)
    error, message = opening_fails(tmp_path / "head.pt"), "large" if zipped else "convert it to safetensors"
    assert isinstance(error, DraftError) and message in str(error)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({"a": 1}, "holds no tensors by name"),
        ({1: torch.zeros(2)}, "holds no tensors by name"),
    ],
    ids=["module", "list", "number", "unnamed"],
)
def test_pickle_without_named_tensors(tmp_path: Path, content: Any, message: str) -> None:
    torch.save(content, tmp_path / "head.pt")
    assert message in str(opening_fails(tmp_path / "head.pt"))

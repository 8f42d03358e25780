"""Model folders: single files, shards with an index, and errors for invalid ones."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.config_sizes import check_sizes
from offspec.checkpoint.folder import INDEX, open_folder
from offspec.checkpoint.known_models import known_config, known_models
from offspec.core.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    ModelNotFoundError,
    TruncatedError,
)
from tests.support.tiny_models import FAMILIES, write_model

FIRST, SECOND = "model-1.safetensors", "model-2.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with two shards."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "vocab_size": 5}')
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, path / FIRST)
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, path / SECOND)
    write_index(path, {"a": FIRST, "b": FIRST, "c": SECOND})
    return path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def opened(folder: Path) -> Checkpoint:
    return open_checkpoint(str(folder))


def refused(folder: Path, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why) as caught:
        opened(folder)
    assert "\n" not in str(caught.value)


def test_shards_with_an_index(folder: Path) -> None:
    found = opened(folder)
    assert (found.name, found.folder) == (str(folder), folder)
    assert found.config == {"model_type": "llama", "vocab_size": 5}
    files = {name: info.file.name for name, info in found.tensors.items()}
    assert files == {"a": FIRST, "b": FIRST, "c": SECOND}
    assert found.nbytes == 24 + 16 + 10
    with pytest.raises(TypeError):
        found.tensors["d"] = found.tensors["a"]  # type: ignore[index]
    write_index(folder, {"b": FIRST})
    assert list(opened(folder).tensors) == ["b"], "only those that are listed"


def test_single_file(folder: Path) -> None:
    (folder / INDEX).unlink()
    refused(folder, CheckpointError, "2 safetensors files but no")
    (folder / SECOND).rename(folder / "weights.safetensors")
    (folder / FIRST).unlink()
    assert opened(folder).tensors["c"].file == folder / "weights.safetensors"
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert opened(folder).tensors["a"].shape == (2,)
    write_index(folder, {"a": FIRST})
    assert opened(folder).tensors["a"].file == folder / "model.safetensors"
    save_file({}, folder / "model.safetensors")
    refused(folder, CheckpointError, "no tensors")


def test_fingerprint_depends_on_relevant_files(folder: Path) -> None:
    first = opened(folder).fingerprint
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    assert opened(folder).fingerprint == opened(moved).fingerprint == first
    seen = {first}
    os.utime(moved / SECOND, ns=(1, 1))
    seen.add(opened(moved).fingerprint)
    (moved / "config.json").write_text("{}")
    seen.add(opened(moved).fingerprint)
    save_file({"c": torch.zeros(6, dtype=torch.bfloat16)}, moved / SECOND)
    seen.add(opened(moved).fingerprint)
    assert len(seen) == 4
    found = opened(moved)
    (moved / SECOND).unlink()
    with pytest.raises(MissingTensorError, match=r"model-2\.safetensors is gone"):
        _ = found.fingerprint


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"", "the file is empty"),
        (b'{\n "a": }', "line 2, column 7"),
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_configuration_that_is_not_json(folder: Path, text: bytes, fault: str) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, HeaderError, rf"config\.json is not valid JSON \({fault}\); download it again$")


def test_missing_and_truncated_files_are_named(folder: Path) -> None:
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1])
    refused(folder, TruncatedError, r"model-1\.safetensors is cut short")
    write_index(folder, {"z": SECOND})
    refused(folder, MissingTensorError, "lacks tensor 'z'")
    (folder / SECOND).unlink()
    refused(folder, MissingTensorError, r"lacks model-2\.safetensors.*download it again")
    (folder / SECOND).symlink_to(folder / "nowhere")
    refused(folder, MissingTensorError, r"lacks model-2\.safetensors")


PLACES = [
    "../model-1.safetensors",
    "/etc/model.safetensors",
    "sub/model-1.safetensors",
    "C:model.safetensors",
]
PLACES += ["..\\model-1.safetensors", "model-1.bin", "..", "", "a\0.safetensors", "a\n.safetensors"]


@pytest.mark.parametrize("place", [*PLACES, "x" * 300 + ".safetensors", None, 1, [FIRST]], ids=str)
def test_index_cannot_point_outside_the_folder(folder: Path, place: Any) -> None:
    write_index(folder, {"a": place})
    refused(folder, HeaderError, "not a file name of this folder")


@pytest.mark.parametrize("weight_map", [None, [], {}, [["a", "b"]]])
def test_index_without_a_map(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    refused(folder, HeaderError, "no weight_map")


@pytest.mark.parametrize("text", [b"", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
def test_invalid_json(folder: Path, text: bytes) -> None:
    for name in (INDEX, "config.json"):
        (folder / name).write_bytes(text)
        refused(folder, HeaderError, f"{name} .*JSON")


@pytest.mark.parametrize(
    ("names", "error", "why"),
    [
        ([], ModelNotFoundError, "is empty"),
        (["notes.txt"], ModelNotFoundError, "no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], ModelNotFoundError, "adapter"),
        (["b.gguf", "a.gguf"], ModelNotFoundError, "a.gguf"),
        (["config.json"], CheckpointError, "no safetensors weights"),
        (["config.json", "pytorch_model.bin"], CheckpointError, "never opened.*convert it to safetensors"),
        (["config.json", "model.pt"], CheckpointError, "convert it to safetensors"),
        (["config.json", "x.gguf", "y.bin"], CheckpointError, r"only GGUF files \(x.gguf\)"),
    ],
)
def test_folders_without_a_model(
    tmp_path: Path, names: list[str], error: type[Exception], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(torch, "load", None)  # pickles are never opened
    refused(tmp_path, error, why)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def model(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_pipes_and_devices_are_refused(model: Path, name: str) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    refused(model, CheckpointError, "pipe or a device")
    (model / name).unlink()
    (model / name).symlink_to("/dev/zero")
    refused(model, CheckpointError, "pipe or a device")


def test_huge_tokenizer_is_not_read(model: Path) -> None:
    os.truncate(model / "tokenizer.json", 2**31)
    refused(model, HeaderError, "implausibly large")


def reconfigure(model: Path, **changes: object) -> None:
    text = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(text | changes))


def test_configuration_that_names_another_file_is_refused(model: Path) -> None:
    shutil.copy(model / "config.json", model / "config.4.0.0.json")
    reconfigure(model, configuration_files=["config.4.0.0.json"])
    refused(model, HeaderError, "configuration_files")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_labels", 10**9),
        ("head_dim", "-1"),
        ("hidden_size", 1e300),
        ("intermediate_size", [48, 10**12]),
        ("vocab_size", True),
        ("num_local_experts", 10**9),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_sizes_that_contradict_the_headers_are_refused(model: Path, name: str, value: object) -> None:
    reconfigure(model, **{name: value})
    refused(model, HeaderError, r"config\.json has (num_hidden_layers|" + name + ")")


@pytest.mark.parametrize("family", [*FAMILIES])
def test_sizes_of_every_family_match_its_tensors(tmp_path: Path, family: str) -> None:
    assert open_folder(write_model(tmp_path / "model", family)).tensors


def test_sizes_of_known_models_are_accepted() -> None:
    for name in known_models():
        config = known_config(name)
        assert config is not None
        check_sizes(config, (), "config.json")

"""Model folders: single files, shards with an index, and everything that can be wrong with them."""

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
from offspec.checkpoint.shapes import known_config, known_models
from offspec.core.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    ModelNotFoundError,
    TruncatedError,
)
from tests.support.tiny_models import FAMILIES, write_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in two shards."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama", "vocab_size": 5}')
    save_file({"a": torch.zeros(2, 3), "b": torch.ones(4)}, path / "model-1.safetensors")
    save_file({"c": torch.zeros(5, dtype=torch.bfloat16)}, path / "model-2.safetensors")
    write_index(path, {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"})
    return path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_with_an_index(folder: Path) -> None:
    found = open_checkpoint(str(folder))
    assert isinstance(found, Checkpoint)
    assert (found.name, found.folder) == (str(folder), folder)
    assert found.config == {"model_type": "llama", "vocab_size": 5}
    assert {name: info.file.name for name, info in found.tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-1.safetensors",
        "c": "model-2.safetensors",
    }
    assert found.nbytes == 24 + 16 + 10
    with pytest.raises(TypeError):
        found.tensors["d"] = found.tensors["a"]  # type: ignore[index]
    with pytest.raises(AttributeError):
        found.name = "other"  # type: ignore[misc]


def test_only_listed_tensors_count(folder: Path) -> None:
    write_index(folder, {"b": "model-1.safetensors"})
    assert list(open_checkpoint(str(folder)).tensors) == ["b"]


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_single_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(2)}, tmp_path / name)
    assert open_checkpoint(str(tmp_path)).tensors["a"].file == tmp_path / name


def test_the_usual_name_wins_over_others(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="2 safetensors files and no"):
        open_checkpoint(str(folder))
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    assert open_checkpoint(str(folder)).tensors["a"].shape == (2,)


def test_the_fingerprint_follows_what_matters(folder: Path) -> None:
    first = open_checkpoint(str(folder)).fingerprint
    assert first == open_checkpoint(str(folder)).fingerprint
    seen = {first}
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    assert open_checkpoint(str(moved)).fingerprint == first
    moved = moved.rename(folder.with_name("renamed"))
    assert open_checkpoint(str(moved)).fingerprint == first
    os.utime(moved / "model-2.safetensors", ns=(1, 1))
    seen.add(open_checkpoint(str(moved)).fingerprint)
    (moved / "config.json").write_text("{}")
    seen.add(open_checkpoint(str(moved)).fingerprint)
    save_file({"c": torch.zeros(6, dtype=torch.bfloat16)}, moved / "model-2.safetensors")
    seen.add(open_checkpoint(str(moved)).fingerprint)
    assert len(seen) == 4
    found = open_checkpoint(str(moved))
    (moved / "model-2.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"model-2\.safetensors is gone"):
        _ = found.fingerprint


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(MissingTensorError, match=r"lacks model-2\.safetensors.*download it again"):
        open_checkpoint(str(folder))
    (folder / "model-2.safetensors").symlink_to(folder / "nowhere")
    with pytest.raises(MissingTensorError, match=r"lacks model-2\.safetensors"):
        open_checkpoint(str(folder))


def test_a_missing_tensor_is_named(folder: Path) -> None:
    write_index(folder, {"a": "model-1.safetensors", "z": "model-2.safetensors"})
    with pytest.raises(MissingTensorError, match="lacks tensor 'z'"):
        open_checkpoint(str(folder))


def test_a_truncated_shard(folder: Path) -> None:
    shard = folder / "model-1.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(TruncatedError, match=r"model-1\.safetensors is cut short"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "place",
    [
        "../model-1.safetensors",
        "/etc/model.safetensors",
        "sub/model-1.safetensors",
        "..\\model-1.safetensors",
        "C:model.safetensors",
        "model-1.bin",
        "..",
        "",
        "a\0.safetensors",
        "a\n.safetensors",
        "x" * 300 + ".safetensors",
        None,
        1,
        ["model-1.safetensors"],
    ],
    ids=str,
)
def test_an_index_cannot_point_out_of_the_folder(folder: Path, place: Any) -> None:
    write_index(folder, {"a": place})
    with pytest.raises(HeaderError, match="no file name of this folder") as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", [["a", "b"]]])
def test_an_index_without_a_map(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    with pytest.raises(HeaderError, match="no weight_map"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe\x00", b"[" * 100_000])
def test_json_that_is_not(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    with pytest.raises(HeaderError, match=f"{name} .*JSON") as caught:
        open_checkpoint(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("names", "error", "why"),
    [
        ([], ModelNotFoundError, "is empty"),
        (["notes.txt"], ModelNotFoundError, "no config.json"),
        (["adapter_config.json", "adapter_model.safetensors"], ModelNotFoundError, "adapter"),
        (["b.gguf", "a.gguf"], ModelNotFoundError, "a.gguf"),
        (["config.json"], CheckpointError, "no safetensors weights"),
        (["config.json", "pytorch_model.bin"], CheckpointError, "convert it to safetensors"),
        (["config.json", "model.pt"], CheckpointError, "convert it to safetensors"),
        (["config.json", "x.gguf", "y.bin"], CheckpointError, r"only GGUF files \(x.gguf\)"),
    ],
)
def test_folders_that_hold_no_model(
    tmp_path: Path, names: list[str], error: type[Exception], why: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(error, match=why):
        open_checkpoint(str(tmp_path))


def test_pickled_weights_are_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", None)
    with pytest.raises(CheckpointError, match="never opened"):
        open_checkpoint(str(tmp_path))


def test_a_model_without_tensors(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no tensors"):
        open_checkpoint(str(tmp_path))


def test_a_single_file_goes_before_an_index_that_was_left(folder: Path) -> None:
    """As in transformers: of a model in shards that was saved again in one file."""
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    for shard in folder.glob("model-*.safetensors"):
        shard.unlink()
    assert open_checkpoint(str(folder)).tensors["a"].file == folder / "model.safetensors"


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("special", ["pipe", "device"])
def test_a_pipe_or_a_device_is_no_file_of_a_model(tmp_path: Path, name: str, special: str) -> None:
    """Of a pipe nothing may ever come, and a device has no end."""
    folder = write_model(tmp_path / "model")
    (folder / name).unlink()
    if special == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="pipe or a device"):
        open_folder(folder)


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    os.truncate(folder / "tokenizer.json", 2**31)
    with pytest.raises(HeaderError, match="too large"):
        open_folder(folder)


def test_a_configuration_that_sends_to_another_file_is_refused(tmp_path: Path) -> None:
    """transformers would read that one, which has another fingerprint or none."""
    folder = write_model(tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    other = text | {"rms_norm_eps": 0.5}
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    (folder / "config.json").write_text(json.dumps(text | {"configuration_files": ["config.4.0.0.json"]}))
    with pytest.raises(HeaderError, match="configuration_files"):
        open_folder(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_labels", 10**9),
        ("head_dim", 10**9),
        ("head_dim", "-1"),
        ("hidden_size", 1e300),
        ("intermediate_size", [48, 10**12]),
        ("vocab_size", True),
        ("num_local_experts", 10**9),
        ("text_config", {"num_hidden_layers": 10**9}),
    ],
)
def test_sizes_that_no_tensor_has_are_refused_by_the_headers(
    tmp_path: Path, name: str, value: object
) -> None:
    folder = write_model(tmp_path / "model")
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {name: value}))
    with pytest.raises(HeaderError, match=r"config\.json has (num_hidden_layers|" + name + ")"):
        open_folder(folder)


@pytest.mark.parametrize("family", [*FAMILIES])
def test_sizes_of_every_family_are_those_of_its_tensors(tmp_path: Path, family: str) -> None:
    assert open_folder(write_model(tmp_path / "model", family)).tensors


@pytest.mark.parametrize("name", known_models())
def test_sizes_of_models_that_are_known_by_name_can_be(name: str) -> None:
    config = known_config(name)
    assert config is not None
    check_sizes(config, (), "config.json")

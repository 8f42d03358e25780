"""Manifest of a pack: written, validated, and compared with the pack's files."""

import json
import os
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.checksum import FileHasher, checksum_of, find_damage
from offspec.checkpoint.pack_manifest import MANIFEST, Manifest, Origin, PackedFile, quoted, read_manifest
from offspec.checkpoint.quantized.packs import checksums
from offspec.checkpoint.tensors import PackedInfo
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, TruncatedError
from offspec.model.quantize.pack import pack_model
from tests.support.tiny_models import write_model

WEIGHT = "model.layers.1.mlp.down_proj.weight"
LAYER = "model-layer-0001.safetensors"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    model = write_model(folder / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    return pack_model(str(model), "nf4", out=folder / "pack").folder


@pytest.fixture
def pack(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "pack"))


def changed(pack: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = pack / MANIFEST
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def refused(pack: Path, error: type[CheckpointError], why: str) -> str:
    with pytest.raises(error, match=why) as caught:
        open_checkpoint(str(pack))
    assert "\n" not in str(caught.value) and "offspec pack" in str(caught.value)
    return str(caught.value)


def test_round_trip(tmp_path: Path) -> None:
    seen = FileHasher(3)
    seen.add(memoryview(b"abcdef"))
    file = PackedFile(seen.result(), {"a.weight": (2, 64)})
    texts = {"tokenizer.json": checksum_of(b"{}"), "\u3000: .txt": checksum_of(b"")}
    manifest = Manifest(Origin("some/model", "f" * 64, "int4-g64"), {"x.safetensors": file}, texts)
    (tmp_path / MANIFEST).write_text(manifest.to_text())
    assert read_manifest(tmp_path) == manifest
    changed(tmp_path, lambda value: value.pop("texts"))  # as in older packs
    assert read_manifest(tmp_path) == replace(manifest, texts={})


STRANGE = [
    "a b",
    "it's",
    "\u30e2\u30c7\u30eb\u30007B",
    "a\u00a0'b\\",
    "\n\x1b[1m",
    "\U0001f469\u200d\U0001f680",
    "\udcffe",
]


def test_names_are_quoted_for_bash() -> None:
    words = [quoted(name) for name in STRANGE]
    assert all(word.isprintable() for word in words)
    shell = shutil.which("bash")
    if shell is None:
        pytest.skip("there is no bash")
    command = [shell, "-c", f"printf '%s\\0' {' '.join(words)}"]
    said = subprocess.run(command, capture_output=True, check=True).stdout
    assert os.fsdecode(said).split("\0") == [*STRANGE, ""]


@pytest.mark.parametrize("name", STRANGE[2:5])
def test_any_model_name_is_allowed(pack: Path, name: str) -> None:
    changed(pack, lambda value: value.update(model=name))
    assert open_checkpoint(str(pack)).tensors[WEIGHT].shape == (64, 128)
    (pack / LAYER).unlink()
    assert refused(pack, MissingTensorError, f"{LAYER} is missing").isprintable()


def test_checksums_do_not_depend_on_buffer_sizes() -> None:
    data = bytes(range(250)) * 4
    for pieces in ((1000,), (3, 4, 93, 900), (100, 900), (999, 1)):
        seen, at = FileHasher(100), 0
        for size in pieces:
            seen.add(memoryview(data)[at : at + size])
            at += size
        found = seen.result()
        assert (found.size, found.start, found.crc32) == (1000, 100, zlib.crc32(data[100:]))
        assert found.blake2b == blake2b(data, digest_size=32).hexdigest()


def test_pack_opens_as_packed_weights(pack: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(str(pack))
    weight = opened.tensors[WEIGHT]
    assert isinstance(weight, PackedInfo)
    assert weight.shape == (64, 128) and weight.format.name.startswith("nf4")
    assert [part.name for _, part in weight.parts] == [f"{WEIGHT}.codes", f"{WEIGHT}.absmax"]
    assert not any(name.endswith((".codes", ".absmax")) for name in opened.tensors)
    assert checksums(tmp_path) == ({}, ""), "other folders have none"


def test_layer_is_one_range_with_a_checksum(pack: Path) -> None:
    from offspec.model.binding import layout_of
    from offspec.model.probe.build import build_skeleton
    from offspec.model.weights import map_weights

    opened = open_checkpoint(str(pack))
    import torch

    skeleton = build_skeleton(pack, torch.bfloat16)
    recipes = [r for r in map_weights(skeleton.model, opened.tensors) if skeleton.layer_of(r.names[0]) == 1]
    (extent,) = layout_of("layer 1", recipes).extents
    found = checksums(pack)[0][extent.file]
    assert (extent.offset, extent.offset + extent.needed) == (found.start, found.size)
    data = extent.file.read_bytes()[extent.offset : extent.offset + extent.needed]
    assert zlib.crc32(data) == found.crc32


def test_damage_is_reported(pack: Path) -> None:
    file, expected = pack / LAYER, read_manifest(pack).files[LAYER].checksum
    counts: list[int] = []
    assert find_damage(file, expected, add=counts.append) is None
    assert find_damage(file, expected, thorough=True) is None
    assert sum(counts) == expected.size - expected.start
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for thorough in (False, True):
        assert "checksum" in str(find_damage(file, expected, thorough=thorough))
    data[-1] ^= 1
    data[20] ^= 1  # in the header, which only the thorough check reads
    file.write_bytes(data)
    assert find_damage(file, expected) is None
    assert "checksum" in str(find_damage(file, expected, thorough=True))
    file.write_bytes(data[:-1])
    assert "instead of" in str(find_damage(file, expected))
    file.unlink()
    assert find_damage(file, expected) == "is missing"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value.update(version=2), "version is 2"),
        (lambda value: value.pop("version"), 'has no "version"'),
        (lambda value: value.update(format="nf3"), 'format is "nf3"; it should be one of nf4'),
        (lambda value: value.pop("model"), "model is missing"),
        (lambda value: value.update(fingerprint=7), "fingerprint is 7; it should be text"),
        (lambda value: value.update(files=[]), "files is .*; it should be a JSON object"),
        (lambda value: value["files"].update({"../up.safetensors": {}}), "not a file name"),
        (
            lambda value: value["files"].update({"x.safetensors": []}),
            "x.safetensors.* should be a JSON object",
        ),
        (lambda value: value.update(model="\ud800"), "surrogates not allowed"),
        (lambda value: value.update(fingerprint="a\n"), "fingerprint is .*; it should be text that prints"),
        (lambda value: value["texts"].update({"../up.json": {}}), "not a file name"),
        (lambda value: value["texts"].update({"a\0.json": {}}), "not a file name"),
        (lambda value: value["texts"]["config.json"].pop("blake2b"), "blake2b is missing"),
        (lambda value: value["files"][LAYER].pop("crc32"), "crc32 is missing"),
        (lambda value: value["files"][LAYER].update(size=-1), "size is -1"),
        (lambda value: value["files"][LAYER].update(start=1.5), "start is 1.5"),
        (lambda value: value["files"][LAYER]["weights"].update({WEIGHT: [64]}), "two dimensions"),
    ],
)
def test_unusable_manifest(pack: Path, change: Callable[[dict[str, Any]], None], why: str) -> None:
    changed(pack, change)
    refused(pack, HeaderError, why)


def test_text_file_name_with_line_breaks(pack: Path) -> None:
    changed(pack, lambda value: value["texts"].update({"x\n.txt": value["texts"]["config.json"]}))
    assert "x\\x0a.txt' is missing" in refused(pack, CheckpointError, "is missing")


def test_pipe_in_place_of_an_empty_text_file(pack: Path) -> None:
    os.mkfifo(pack / "notes")
    changed(pack, lambda value: value["texts"].update({"notes": asdict(checksum_of(b""))}))
    refused(pack, CheckpointError, "notes cannot be read .not a regular file, but a pipe")


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}'])
def test_file_that_is_not_a_manifest(pack: Path, text: str) -> None:
    (pack / MANIFEST).write_text(text)
    message = refused(pack, HeaderError, "not a usable manifest")
    assert "download" not in message


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda value: value.update(format="int8"), "does not match .* codes"),
        (lambda value: value["files"][LAYER]["weights"].update({WEIGHT: [64, 192]}), "does not match"),
        (lambda value: value["files"][LAYER]["weights"].update({WEIGHT: [64, 100]}), "does not match"),
        (lambda value: value["files"][LAYER]["weights"].update({"none.weight": [64, 128]}), "none.weight"),
        (
            lambda value: value["files"]["model-rest.safetensors"]["weights"].update({WEIGHT: [64, 128]}),
            "is not in",
        ),
    ],
)
def test_manifest_of_other_tensors(pack: Path, change: Callable[[dict[str, Any]], None], why: str) -> None:
    changed(pack, change)
    refused(pack, HeaderError, why)


def test_manifest_of_another_model(pack: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", hidden_size=64, intermediate_size=192, num_hidden_layers=2)
    shutil.copy(pack_model(str(other), "nf4", out=tmp_path / "b").folder / MANIFEST, pack / MANIFEST)
    refused(pack, TruncatedError, r"bytes instead of")


def test_configuration_of_another_model(pack: Path, tmp_path: Path) -> None:
    import torch

    from offspec.model.loaded import LoadedModel

    config = json.loads((pack / "config.json").read_text())
    (pack / "config.json").write_text(json.dumps({**config, "intermediate_size": 192}))
    refused(pack, CheckpointError, r"config.json has .* instead of")
    changed(pack, lambda value: value.pop("texts"))  # as in older packs
    opened = open_checkpoint(str(pack))
    with pytest.raises(CheckpointError, match="do not belong together"):
        LoadedModel(opened.folder, opened.tensors, torch.float32, torch.device("cpu"))


def test_truncated_or_missing_layer_or_text(pack: Path) -> None:
    whole = (pack / LAYER).read_bytes()
    (pack / LAYER).write_bytes(whole[:-1])
    refused(pack, TruncatedError, f"{LAYER} has .* instead of")
    (pack / LAYER).unlink()
    message = refused(pack, MissingTensorError, f"{LAYER} is missing")
    assert "--to nf4" in message and f"--out {pack}" in message
    (pack / LAYER).write_bytes(whole)
    (pack / "tokenizer.json").unlink()
    refused(pack, CheckpointError, "tokenizer.json is missing")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
def test_changed_text_file(pack: Path, name: str) -> None:
    data = bytearray((pack / name).read_bytes())
    data[len(data) // 2] ^= 1
    (pack / name).write_bytes(data)
    refused(pack, CheckpointError, rf"{name} is damaged: .* run `offspec pack .* again")

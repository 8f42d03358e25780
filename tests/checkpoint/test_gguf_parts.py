"""Models split into several GGUF files, as llama.cpp's own tools split them."""

import os
from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.gguf.header import read_gguf
from offspec.checkpoint.tensors import stored_tensors
from offspec.core.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    TruncatedError,
    UnsupportedModelError,
)
from tests.support.gguf_files import UnpackEnvironment, split_gguf, write_gguf
from tests.support.gguf_values import load_float32


@pytest.fixture
def whole(bench: UnpackEnvironment, llama: PreTrainedModel) -> Path:
    write_gguf(bench.file, llama, "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    return bench.file


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    return split_gguf(whole, whole.parent / "parts")


def opened(file: Path, bench: UnpackEnvironment, *, unpack: bool = False) -> Checkpoint:
    return open_checkpoint(str(file), unpack=unpack, cache_dir=bench.cache)


def refused(file: Path, bench: UnpackEnvironment, error: type[CheckpointError], why: str) -> None:
    with pytest.raises(error, match=why):
        opened(file, bench)


@pytest.mark.parametrize("first_empty", [False, True])
def test_any_part_opens_the_whole_model(bench: UnpackEnvironment, whole: Path, first_empty: bool) -> None:
    files = split_gguf(whole, whole.parent / "parts", first_empty=first_empty)
    expected = load_float32(bench.open()).state_dict()
    folders = set()
    for file in files:
        checkpoint = opened(file, bench)
        folders.add(checkpoint.folder)
        found = load_float32(checkpoint).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        used = {info.file for weight in checkpoint.tensors.values() for info in stored_tensors(weight)}
        assert used == set(files[first_empty:])
    assert len(folders) == 1
    assert opened(files[0], bench, unpack=True).nbytes == bench.open(unpack=True).nbytes
    os.utime(files[2], ns=(1, 1))
    assert opened(files[0], bench).folder not in folders, "another part is another model"


def test_missing_or_truncated_part(bench: UnpackEnvironment, parts: list[Path]) -> None:
    last = max(read_gguf(parts[1]).tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(parts[1], last.offset + last.nbytes - 1)
    refused(parts[0], bench, TruncatedError, "00002")
    parts[1].unlink()
    refused(parts[2], bench, MissingTensorError, r"tiny-00002-of-00003\.gguf is missing \(part 2 of 3\)")


def test_renamed_part(bench: UnpackEnvironment, parts: list[Path]) -> None:
    mine = parts[1].rename(parts[1].with_name("mine.gguf"))
    refused(mine, bench, UnsupportedModelError, "one of 3 parts: restore its original name")


def test_part_in_place_of_another(bench: UnpackEnvironment, parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    refused(parts[0], bench, HeaderError, "not part 3 of 3")
    longer = [part.rename(part.with_name(part.name.replace("of-00003", "of-00004"))) for part in parts]
    refused(longer[0], bench, HeaderError, "one of 3 parts")


def test_parts_of_different_models(bench: UnpackEnvironment, whole: Path, parts: list[Path]) -> None:
    others = split_gguf(whole, whole.parent / "others", first_empty=True)
    parts[1].write_bytes(others[1].read_bytes())
    refused(parts[0], bench, HeaderError, r"is in another part too|all parts together have")
    stated = split_gguf(whole, whole.parent / "stated", stated=5)
    refused(stated[0], bench, HeaderError, "it declares 5 tensors, and all parts together have")


def test_invalid_numbers(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama", keys={"split.count": "three"})
    refused(bench.file, bench, CheckpointError, r"split\.count is 'three'")

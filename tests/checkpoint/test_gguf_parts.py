"""Models split into several GGUF files, as llama.cpp's own tools split them."""

import os
from pathlib import Path

import gguf
import pytest
import torch
from transformers import PreTrainedModel

from offspec.checkpoint import Checkpoint, open_checkpoint
from offspec.checkpoint.gguf.header import read_gguf
from offspec.checkpoint.tensors import on_disk
from offspec.core.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    TruncatedError,
    UnsupportedModelError,
)
from tests.checkpoint.gguf_files import Bench, split_gguf, write_gguf
from tests.checkpoint.gguf_values import ours


@pytest.fixture
def whole(bench: Bench, llama: PreTrainedModel) -> Path:
    write_gguf(bench.file, llama, "llama", kind=gguf.GGMLQuantizationType.Q8_0)
    return bench.file


@pytest.fixture
def parts(whole: Path) -> list[Path]:
    return split_gguf(whole, whole.parent / "parts")


def opened(file: Path, bench: Bench, *, unpack: bool = False) -> Checkpoint:
    return open_checkpoint(str(file), unpack=unpack, cache_dir=bench.cache)


@pytest.mark.parametrize("first_empty", [False, True])
def test_any_part_opens_the_whole(bench: Bench, whole: Path, first_empty: bool) -> None:
    files = split_gguf(whole, whole.parent / "parts", first_empty=first_empty)
    expected = ours(bench.open()).state_dict()
    folders = set()
    for file in files:
        checkpoint = opened(file, bench)
        folders.add(checkpoint.folder)
        found = ours(checkpoint).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        used = {info.file for weight in checkpoint.tensors.values() for info in on_disk(weight)}
        assert used == set(files[first_empty:])
    assert len(folders) == 1


def test_parts_are_unpacked_together(bench: Bench, whole: Path, parts: list[Path]) -> None:
    assert opened(parts[0], bench, unpack=True).nbytes == bench.open(unpack=True).nbytes


def test_another_part_is_another_folder(bench: Bench, parts: list[Path]) -> None:
    first = opened(parts[0], bench).folder
    os.utime(parts[2], ns=(1, 1))
    assert opened(parts[0], bench).folder != first


def test_a_missing_part(bench: Bench, parts: list[Path]) -> None:
    parts[1].unlink()
    with pytest.raises(MissingTensorError, match=r"tiny-00002-of-00003\.gguf is missing, part 2 of 3"):
        opened(parts[2], bench)


def test_a_part_under_a_name_of_its_own(bench: Bench, parts: list[Path]) -> None:
    with pytest.raises(UnsupportedModelError, match="one of 3 parts: give it its own name"):
        opened(parts[1].rename(parts[1].with_name("mine.gguf")), bench)


def test_a_part_in_the_place_of_another(bench: Bench, parts: list[Path]) -> None:
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(HeaderError, match="not part 3 of 3"):
        opened(parts[0], bench)
    longer = [part.rename(part.with_name(part.name.replace("of-00003", "of-00004"))) for part in parts]
    with pytest.raises(HeaderError, match="one of 3 parts"):
        opened(longer[0], bench)


def test_parts_of_different_models(bench: Bench, whole: Path, parts: list[Path]) -> None:
    others = split_gguf(whole, whole.parent / "others", first_empty=True)
    parts[1].write_bytes(others[1].read_bytes())
    with pytest.raises(HeaderError, match=r"is in another part too|all parts together have"):
        opened(parts[0], bench)
    stated = split_gguf(whole, whole.parent / "stated", stated=5)
    with pytest.raises(HeaderError, match="it states 5 tensors, and all parts together have"):
        opened(stated[0], bench)


def test_a_part_cut_short(bench: Bench, parts: list[Path]) -> None:
    last = max(read_gguf(parts[1]).tensors.values(), key=lambda tensor: tensor.offset)
    os.truncate(parts[1], last.offset + last.nbytes - 1)
    with pytest.raises(TruncatedError, match="00002"):
        opened(parts[0], bench)


def test_numbers_that_are_none(bench: Bench, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama", keys={"split.count": "three"})
    with pytest.raises(CheckpointError, match=r"split\.count is 'three'"):
        bench.open()

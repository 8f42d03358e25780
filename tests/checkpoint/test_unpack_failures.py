"""Refused GGUF files; a failure to open or unpack one leaves nothing."""

import errno
import os
import shutil
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.gguf.dequantize import read_rows
from offspec.checkpoint.gguf.header import read_gguf
from offspec.core.errors import (
    CheckpointError,
    DiskFullError,
    HeaderError,
    MissingTensorError,
    OffspecError,
    UnsupportedModelError,
)
from offspec.core.events import Event, LoadProgress
from tests.support.gguf_files import UnpackEnvironment, write_gguf
from tests.support.versions import has_transformers

Q8 = gguf.GGMLQuantizationType.Q8_0


TENSOR = np.ones((4, 4), np.float32)


def scaling(**keys: Any) -> dict[str, Any]:
    return {f"llama.rope.scaling.{key}": value for key, value in keys.items()}


REFUSED: list[tuple[dict[str, Any], type[OffspecError], str]] = [
    ({"tensors": {"blk.0.new.weight": TENSOR[0]}}, UnsupportedModelError, "model does not have"),
    ({"tensors": {"blk.9.ffn_up.weight": TENSOR}}, HeaderError, "tensors of 4"),
    ({"tensors": {"blk.0.ffn_up.weight": TENSOR}}, HeaderError, "the model expects"),
    ({"without": ("blk.1.ffn_up.weight",)}, MissingTensorError, r"model\.layers\.1\.mlp\.up_proj"),
    ({"keys": {"llama.attention.head_count": 5}}, CheckpointError, "the model expects|cannot build a model"),
    ({"keys": {"llama.attention.head_count": 0}}, UnsupportedModelError, "cannot build a model"),
    ({"keys": {"llama.block_count": 2**31 - 1}}, HeaderError, "'2147483647' layers"),
    ({"keys": {"llama.block_count": "three"}}, HeaderError, "'three' layers"),
    ({"keys": {"llama.embedding_length": [64, 64]}}, UnsupportedModelError, "cannot build a model"),
    ({"keys": {"tokenizer.ggml.eos_token_id": ["2"]}}, HeaderError, "eos token id"),
    ({"keys": scaling(type="longrope", factor=2.0)}, UnsupportedModelError, "longrope"),
    ({"keys": {"llama.rope.scale_linear": np.nan}}, HeaderError, "scale_linear: 'nan'"),
    ({"keys": scaling(factor=-3.0)}, HeaderError, "factor: '-3.0'"),
    ({"keys": scaling(factor=np.inf)}, HeaderError, "factor: 'inf'"),
    ({"keys": scaling(factor="four")}, HeaderError, "factor: 'four'"),
    (
        {"keys": scaling(type="yarn", factor=4.0, original_context_length=0)},
        *(HeaderError, "original_context_length: '0'"),
    ),
    (
        {"keys": scaling(factor=4.0), "tensors": {"rope_freqs.weight": np.ones(8, np.float32)}},
        *(UnsupportedModelError, "in two ways"),
    ),
    ({"keys": {"llama.rope.freq_base": 0.0}}, HeaderError, "freq_base: '0.0'"),
    ({"keys": {"llama.rope.freq_base": "abc"}}, HeaderError, "freq_base: 'abc'"),
    ({"keys": {"general.architecture": "rwkv7"}}, UnsupportedModelError, "'rwkv7'"),
    ({"keys": {"tokenizer.ggml.model": "rwkv"}}, UnsupportedModelError, "tokenizer"),
    ({"keys": {"tokenizer.ggml.merges": ["no such"]}}, UnsupportedModelError, "tokenizer"),
]


@pytest.mark.parametrize(("changes", "error", "why"), REFUSED)
def test_inconsistent_file_is_refused(
    bench: UnpackEnvironment,
    llama: PreTrainedModel,
    changes: dict[str, Any],
    error: type[OffspecError],
    why: str,
) -> None:
    if why == "tokenizer" and not has_transformers("5.18"):
        pytest.skip("an older transformers reads such a tokenizer")
    write_gguf(bench.file, llama, "llama", **changes)
    for unpack in (False, True):
        with pytest.raises(error, match=why) as caught:
            bench.open(unpack=unpack)
        assert "\n" not in str(caught.value)
        assert bench.cached_names() == []


def test_an_unknown_type(
    bench: UnpackEnvironment, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(bench.file, llama, "llama", kind=Q8)

    def unknown(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", unknown)
    with pytest.raises(UnsupportedModelError, match="choose a file of another type"):
        bench.open(unpack=True)


def test_disk_that_is_too_small(
    bench: UnpackEnvironment, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(bench.file, llama, "llama")
    usage = shutil.disk_usage(bench.file.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    for unpack, what in ((True, "unpacking"), (False, "the tokenizer of")):
        why = rf"{what} tiny\.gguf needs .* in .*cache.* OFFSPEC_CACHE"
        with pytest.raises(DiskFullError, match=why):
            bench.open(unpack=unpack)
    assert bench.cached_names() == []
    assert not any(isinstance(event, LoadProgress) for event in bench.events)


@pytest.mark.parametrize(("after", "unpack"), [(0, True), (20, True), (1, False)])
def test_disk_fills_up(
    bench: UnpackEnvironment,
    llama: PreTrainedModel,
    monkeypatch: pytest.MonkeyPatch,
    after: int,
    unpack: bool,
) -> None:
    write_gguf(bench.file, llama, "llama")
    write = os.write
    calls = iter(range(1000))

    def full(fd: int, data: bytes) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match="free some space"):
        bench.open(unpack=unpack)
    assert bench.cached_names() == []
    monkeypatch.undo()
    assert bench.open(unpack=unpack).tensors


def test_interrupt_leaves_no_files(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")

    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.done > event.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(str(bench.file), unpack=True, notify=stop, cache_dir=bench.cache)
    assert bench.cached_names() == []


def test_file_truncated_during_unpacking(bench: UnpackEnvironment, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")
    tensor = next(iter(read_gguf(bench.file).tensors.values()))
    os.truncate(bench.file, tensor.offset + 10)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_rows(tensor, 0, 2)
    bench.file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read_rows(tensor, 0, 2)

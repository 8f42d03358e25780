"""What is refused of GGUF files, and what is left behind when opening or unpacking one fails: nothing."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import PreTrainedModel

from offspec.checkpoint import open_checkpoint
from offspec.checkpoint.gguf.header import read_gguf
from offspec.checkpoint.gguf.values import read_rows
from offspec.core.errors import (
    CheckpointError,
    DiskFullError,
    HeaderError,
    MissingTensorError,
    OffspecError,
    UnsupportedModelError,
)
from offspec.core.events import Event, LoadProgress
from tests.checkpoint.gguf_files import Bench, write_gguf
from tests.support.versions import needs_transformers

Q8 = gguf.GGMLQuantizationType.Q8_0


Change = Callable[[Path, PreTrainedModel], None]


def changed(**changes: Any) -> Change:
    return lambda file, model: write_gguf(file, model, "llama", **changes)


@pytest.mark.parametrize(
    ("write", "error", "why"),
    [
        (changed(tensors={"blk.0.new.weight": np.ones(4, np.float32)}), UnsupportedModelError, "no place"),
        (
            changed(tensors={"blk.9.ffn_up.weight": np.ones((4, 4), np.float32)}),
            HeaderError,
            "tensors of 4",
        ),
        (changed(without=("blk.1.ffn_up.weight",)), MissingTensorError, r"model\.layers\.1\.mlp\.up_proj"),
        (changed(without=("token_embd.weight",)), MissingTensorError, "embed_tokens"),
        (changed(tensors={"blk.0.ffn_up.weight": np.ones((4, 4), np.float32)}), HeaderError, "the model has"),
        (changed(keys={"llama.attention.head_count": 5}), CheckpointError, "the model|no model"),
        (changed(keys={"llama.attention.head_count": 0}), UnsupportedModelError, "no model"),
        (changed(keys={"llama.block_count": 2**31 - 1}), HeaderError, "'2147483647' layers"),
        (changed(keys={"tokenizer.ggml.eos_token_id": ["2"]}), HeaderError, "eos token id"),
        (changed(keys={"llama.block_count": "three"}), HeaderError, "'three' layers"),
        (changed(keys={"llama.embedding_length": [64, 64]}), UnsupportedModelError, "no model"),
        (
            changed(keys={"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}),
            UnsupportedModelError,
            "longrope",
        ),
        (
            changed(keys={"llama.rope.scale_linear": float("nan")}),
            HeaderError,
            "scale_linear cannot be 'nan'",
        ),
        (changed(keys={"llama.rope.scaling.factor": -3.0}), HeaderError, "factor cannot be '-3.0'"),
        (changed(keys={"llama.rope.scaling.factor": float("inf")}), HeaderError, "factor cannot be 'inf'"),
        (changed(keys={"llama.rope.scaling.factor": "four"}), HeaderError, "factor cannot be 'four'"),
        (
            changed(
                keys={
                    "llama.rope.scaling.type": "yarn",
                    "llama.rope.scaling.factor": 4.0,
                    "llama.rope.scaling.original_context_length": 0,
                }
            ),
            HeaderError,
            "original_context_length cannot be '0'",
        ),
        (
            changed(
                keys={"llama.rope.scaling.factor": 4.0},
                tensors={"rope_freqs.weight": np.ones(8, np.float32)},
            ),
            UnsupportedModelError,
            "in two ways",
        ),
        (changed(keys={"llama.rope.freq_base": -1.0}), HeaderError, "freq_base cannot be '-1.0'"),
        (changed(keys={"llama.rope.freq_base": 0.0}), HeaderError, "freq_base cannot be '0.0'"),
        (changed(keys={"llama.rope.freq_base": "abc"}), HeaderError, "freq_base cannot be 'abc'"),
        pytest.param(
            *(changed(keys={"tokenizer.ggml.model": "rwkv"}), UnsupportedModelError, "tokenizer"),
            marks=needs_transformers("5.18"),
        ),
        (changed(keys={"tokenizer.ggml.merges": ["no such"]}), UnsupportedModelError, "tokenizer"),
        (changed(keys={"general.architecture": "rwkv7"}), UnsupportedModelError, "'rwkv7'"),
    ],
)
@pytest.mark.parametrize("unpack", [False, True], ids=["packed", "unpacked"])
def test_a_file_that_is_not_quite_the_model_is_refused(
    bench: Bench, llama: PreTrainedModel, write: Change, error: type[OffspecError], why: str, unpack: bool
) -> None:
    write(bench.file, llama)
    with pytest.raises(error, match=why) as caught:
        bench.open(unpack=unpack)
    assert "\n" not in str(caught.value)
    assert bench.left() == []


def test_a_type_that_cannot_be_unpacked(
    bench: Bench, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(bench.file, llama, "llama", kind=Q8)

    def unknown(*_: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(gguf, "dequantize", unknown)
    with pytest.raises(UnsupportedModelError, match="choose a file of another type"):
        bench.open(unpack=True)


def test_a_disk_too_small_is_known_beforehand(
    bench: Bench, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(bench.file, llama, "llama")
    usage = shutil.disk_usage(bench.file.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    with pytest.raises(DiskFullError, match=r"unpacking tiny\.gguf needs .* in .*cache.* OFFSPEC_CACHE"):
        bench.open(unpack=True)
    with pytest.raises(
        DiskFullError, match=r"the tokenizer of tiny\.gguf needs .* in .*cache.* OFFSPEC_CACHE"
    ):
        bench.open()
    assert bench.left() == []
    assert not any(isinstance(event, LoadProgress) for event in bench.events)


@pytest.mark.parametrize(("after", "unpack"), [(0, True), (5, True), (20, True), (0, False), (1, False)])
def test_a_disk_that_fills_up(
    bench: Bench, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, after: int, unpack: bool
) -> None:
    write_gguf(bench.file, llama, "llama")
    write = os.write
    calls = iter(range(1000))

    def full(fd: int, data: bytes) -> int:
        if next(calls) >= after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(DiskFullError, match="make room"):
        bench.open(unpack=unpack)
    assert bench.left() == []
    monkeypatch.undo()
    assert bench.open(unpack=unpack).tensors


def test_an_interrupt_leaves_nothing(bench: Bench, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")

    def stop(event: Event) -> None:
        if isinstance(event, LoadProgress) and event.done > event.total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_checkpoint(str(bench.file), unpack=True, notify=stop, cache_dir=bench.cache)
    assert bench.left() == []


def test_a_file_that_shrinks_meanwhile(bench: Bench, llama: PreTrainedModel) -> None:
    write_gguf(bench.file, llama, "llama")
    tensor = next(iter(read_gguf(bench.file).tensors.values()))
    os.truncate(bench.file, tensor.offset + 10)
    with pytest.raises(CheckpointError, match="changed while it was read"):
        read_rows(tensor, 0, 2)
    bench.file.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        read_rows(tensor, 0, 2)

"""Streaming writer: its files are readable by other libraries, and unfinished files are absent."""

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from offspec.checkpoint.safetensors_writer import ALIGNMENT, SafetensorsWriter
from offspec.core.errors import DiskFullError


def test_reads_back_with_the_reference_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(3, 5, dtype=torch.bfloat16),
        "a": torch.arange(7),
        "scalar": torch.tensor(2.5),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(4, 6).T,
    }
    names = {torch.bfloat16: "BF16", torch.int64: "I64", torch.float32: "F32"}
    path = tmp_path / "model.safetensors"
    written: list[int] = []
    entries = [(name, names[t.dtype], tuple(t.shape)) for name, t in tensors.items()]
    with SafetensorsWriter(path, entries, metadata={"who": "me"}, on_write=written.append) as out:
        for name, tensor in tensors.items():
            out.write(name, tensor)
        assert not path.exists()
    loaded = load_file(path)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "who": "me"}
    assert sum(written) == sum(t.nbytes for t in tensors.values())
    assert path.stat().st_size == out.nbytes
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("names", [0, 111, 296])
def test_data_is_aligned(tmp_path: Path, names: int) -> None:
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, [(f"t{i}", "U8", (1,)) for i in range(names)]) as out:
        for i in range(names):
            out.write(f"t{i}", bytes([i % 256]))
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % ALIGNMENT == 0
    assert data[8 + length :] == bytes(i % 256 for i in range(names))
    json.loads(data[8 : 8 + length])


def test_pieces_and_buffers(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    grid = np.arange(12, dtype=np.float32).reshape(3, 4)
    entries = [("grid", "F32", (3, 4)), ("bytes", "U8", (4,)), ("t", "F32", (4, 3))]
    with SafetensorsWriter(path, entries) as out:
        for row in grid:
            out.write("grid", row)
        out.write("bytes", b"ab")
        out.write("bytes", bytearray(b"cd"))
        out.write("t", grid.T)
    loaded = load_file(path)
    assert np.array_equal(loaded["grid"].numpy(), grid)
    assert bytes(loaded["bytes"].numpy()) == b"abcd"
    assert np.array_equal(loaded["t"].numpy(), grid.T)


@pytest.mark.parametrize(
    "writes",
    [
        [("b", b"1234")],
        [("a", b"12345")],
        [("a", b"12"), ("b", b"1234")],
        [("a", b"1234"), ("b", b"12")],
        [("a", b"1234"), ("b", b"1234"), ("c", b"1")],
        [],
    ],
)
def test_wrong_order_of_calls_leaves_no_file(tmp_path: Path, writes: list[tuple[str, bytes]]) -> None:
    path = tmp_path / "x.safetensors"
    writer = SafetensorsWriter(path, [("a", "U8", (4,)), ("b", "U8", (4,))])
    with pytest.raises(ValueError), writer as out:
        for name, data in writes:
            out.write(name, data)
    assert os.listdir(tmp_path) == []


def test_names_must_differ(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="listed twice"):
        SafetensorsWriter(tmp_path / "x", [("a", "U8", (4,)), ("a", "U8", (4,))])


def test_interrupt_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), SafetensorsWriter(path, [("a", "U8", (4,))]) as out:
        out.write("a", b"12")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["x.safetensors"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("write", errno.ENOSPC),
        ("fsync", errno.EDQUOT),
        ("posix_fallocate", errno.ENOSPC),
        ("open", errno.EDQUOT),
        ("replace", errno.ENOSPC),
    ],
)
def test_full_disk_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = tmp_path / "x.safetensors"

    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, full)
    with (
        pytest.raises(DiskFullError, match=r"x\.safetensors.*free some space"),
        SafetensorsWriter(path, [("a", "U8", (4,))]) as out,
    ):
        out.write("a", b"1234")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == []


def test_file_system_without_preallocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(os, "posix_fallocate", unsupported, raising=False)
    path = tmp_path / "x.safetensors"
    with SafetensorsWriter(path, [("a", "U8", (4,))]) as out:
        out.write("a", b"1234")
    assert path.read_bytes().endswith(b"1234")


def test_other_errors_pass_through(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), SafetensorsWriter(tmp_path / "no" / "x", [("a", "U8", (4,))]):
        pass

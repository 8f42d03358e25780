"""Headers of safetensors files: valid ones are read, invalid ones refused with a reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from offspec.checkpoint.safetensors import MAX_HEADER, read_header
from offspec.checkpoint.tensors import DTYPE_BITS, TensorInfo, item_size, nbytes_of, torch_dtype
from offspec.core.errors import (
    CheckpointError,
    HeaderError,
    OffspecError,
    TruncatedError,
    UnsupportedModelError,
)

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(path: Path, header: Any, data: bytes = bytes(24), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.safetensors"


def test_tensor_offsets_match_the_library(path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 4, dtype=torch.bfloat16),
        "b.weight": torch.arange(5),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(1.5),
        "flags": torch.tensor([True, False]),
    }
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    found, metadata = read_header(path)
    assert metadata == {"format": "pt"}
    assert found.keys() == tensors.keys()
    data = path.read_bytes()
    for name, tensor in tensors.items():
        info = found[name]
        assert (info.shape, torch_dtype(info.dtype), info.file) == (tuple(tensor.shape), tensor.dtype, path)
        raw = data[info.offset : info.offset + info.nbytes]
        assert raw == bytes(tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else b"")


def test_padding_and_holes_are_allowed(path: Path) -> None:
    text = json.dumps({"a": ENTRY | {"data_offsets": [8, 32]}}).encode() + b" " * 100
    found, _ = read_header(file_of(path, text, bytes(40)))
    assert found["a"] == TensorInfo("a", "F32", (2, 3), path, 8 + len(text) + 8, 24)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        ENTRY | {"extra": 1},
        {"dtype": "F32", "shape": [2, 3]},
        ENTRY | {"dtype": "F33"},
        ENTRY | {"dtype": "F32\n"},
        ENTRY | {"shape": None},
        ENTRY | {"shape": "23"},
        ENTRY | {"shape": [2, -3]},
        ENTRY | {"shape": [True, 6]},
        ENTRY | {"shape": [2.0, 3]},
        ENTRY | {"shape": [2**63, 3]},
        ENTRY | {"shape": [2, 3] + [1] * 100},
        ENTRY | {"shape": [2, 4]},
        ENTRY | {"shape": [0, 2**62]},
        ENTRY | {"data_offsets": None},
        ENTRY | {"data_offsets": [0]},
        ENTRY | {"data_offsets": [24, 0]},
        ENTRY | {"data_offsets": [0, 23]},
        ENTRY | {"data_offsets": [False, 24]},
        ENTRY | {"data_offsets": [2**64, 2**64 + 24]},
        {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]},
    ],
    ids=str,
)
def test_invalid_entry_is_refused(path: Path, entry: Any) -> None:
    with pytest.raises(HeaderError, match=r"damaged header.*download it again"):
        read_header(file_of(path, {"a": entry}))


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"{}x",
        b"\xff\xfe",
        b'{"a":NaN}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"__metadata__":{"a":1}}',
        b'{"__metadata__":[]}',
        b'{"\\ud800":' + json.dumps(ENTRY).encode() + b"}",
        b'{"a":%b,"a":%b}' % ((json.dumps(ENTRY).encode(),) * 2),
        b'{"a":{"dtype":"F32","dtype":"I32","shape":[2,3],"data_offsets":[0,24]}}',
        b"[]",
    ],
    ids=lambda header: header[:30],
)
def test_header_that_is_not_an_object_of_tensors_is_refused(path: Path, header: bytes) -> None:
    with pytest.raises(HeaderError) as caught:
        read_header(file_of(path, header))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_overlapping_tensors_are_refused(path: Path) -> None:
    for other in ([0, 24], [20, 44], [23, 47]):
        with pytest.raises(HeaderError, match="overlap"):
            read_header(file_of(path, {"a": ENTRY, "b": ENTRY | {"data_offsets": other}}, bytes(99)))


def test_truncated_file_names_both_sizes(path: Path) -> None:
    file_of(path, {"a": ENTRY}, bytes(24))
    whole = path.read_bytes()
    for size in (len(whole) - 1, len(whole) - 24, 40, 10, 9, 8, 1, 0):
        path.write_bytes(whole[:size])
        found = f"has {size:,}" if size else "the file is empty"
        with pytest.raises(TruncatedError, match=rf"{found}; download it again"):
            read_header(path)
    path.write_bytes(whole[:-1])
    with pytest.raises(TruncatedError, match=f"at least {len(whole):,} bytes"):
        read_header(path)


@pytest.mark.parametrize(
    ("length", "error", "why"),
    [
        (MAX_HEADER + 1, HeaderError, "not a safetensors file"),
        (2**64 - 1, HeaderError, "not a safetensors file"),
        (0, HeaderError, "empty"),
        (MAX_HEADER, TruncatedError, "cut short"),
    ],
)
def test_invalid_lengths(path: Path, length: int, error: type[CheckpointError], why: str) -> None:
    with pytest.raises(error, match=why):
        read_header(file_of(path, {}, length=length))


def test_an_empty_file_is_called_empty(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(TruncatedError, match=r"cut short: the file is empty; download it again$"):
        read_header(path)


def test_git_lfs_pointer_is_explained(path: Path) -> None:
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(HeaderError, match="git lfs pull"):
        read_header(path)


def test_unreadable_file(path: Path) -> None:
    for place, why in ((path, "No such file"), (path.parent, "directory")):
        with pytest.raises(CheckpointError, match=why):
            read_header(place)


def test_sizes_and_dtypes() -> None:
    assert [item_size(name) for name in ("U8", "BF16", "F32", "I64")] == [1, 2, 4, 8]
    assert nbytes_of("F4", (4,)) == 2
    with pytest.raises(ValueError, match="inside a byte"):
        nbytes_of("F4", (3,))
    with pytest.raises(UnsupportedModelError):
        item_size("F4")
    with pytest.raises(UnsupportedModelError):
        torch_dtype("F6_E2M3")
    for name in DTYPE_BITS:
        if not name.startswith(("F4", "F6")):
            assert torch_dtype(name).itemsize == item_size(name)


def check_only_our_errors(path: Path) -> None:
    """Read the header, and compare it with the file."""
    try:
        found, _ = read_header(path)
    except OffspecError as error:
        assert "\n" not in str(error)
        str(error).encode()
        return
    end = 0
    for info in sorted(found.values(), key=lambda info: (info.offset, info.nbytes)):
        assert info.nbytes == nbytes_of(info.dtype, info.shape)
        assert info.nbytes == 0 or info.offset >= end
        end = max(end, info.offset + info.nbytes)
    assert end <= path.stat().st_size or not any(info.nbytes for info in found.values())


_INTS = st.one_of(st.integers(-2, 30), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30]))
_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), _INTS, st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
_ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "f32", ""]) | _VALUES,
        "shape": st.lists(_INTS, max_size=4) | _VALUES,
        "data_offsets": st.tuples(_INTS, _INTS) | _VALUES,
    }
)


@given(header=st.dictionaries(st.text(max_size=3), _ENTRIES | _VALUES, max_size=4) | _VALUES)
@settings(max_examples=120)
def test_random_headers(scratch: Path, header: Any) -> None:
    check_only_our_errors(file_of(scratch, header))

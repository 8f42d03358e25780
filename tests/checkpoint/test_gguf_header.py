"""Headers of GGUF files: valid ones are read, invalid ones refused with a reason."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offspec.checkpoint.gguf.header import GGML_TYPES, MAX_HEADER, read_gguf
from offspec.core.errors import CheckpointError, HeaderError, OffspecError, TruncatedError

U32, STRING, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def row(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(
    keys: list[bytes], rows: list[bytes], *, version: int = 3, counts: tuple[int, int] | None = None
) -> bytes:
    tensors, pairs = counts or (len(rows), len(keys))
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(keys) + b"".join(rows)


def padded(head: bytes, data: int = 0, alignment: int = 32) -> bytes:
    return head + bytes(-len(head) % alignment + data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "model.gguf"


def read(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return read_gguf(path)


def valid_file(path: Path) -> bytes:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("name", "Grüße")
    writer.add_array("tokens", ["a", "", "é"])
    writer.add_array("types", [1, 2, 3])
    writer.add_key_value("big", 2**40, gguf.GGUFValueType.UINT64)
    writer.add_tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    blocks = gguf.quantize(np.ones((2, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("c.bias", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_agrees_with_the_library(path: Path) -> None:
    valid_file(path)
    found = read_gguf(path)
    reader = gguf.GGUFReader(path)
    assert found.version == 3
    for field in reader.fields.values():
        if not field.name.startswith("GGUF."):
            assert found.metadata[field.name] == field.contents()
    assert len(found.tensors) == len(reader.tensors) == 3
    for tensor in reader.tensors:
        mine = found.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (mine.offset, mine.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert mine.kind.id == tensor.tensor_type


def test_table_of_types_equals_the_librarys() -> None:
    for number, (block, size) in gguf.GGML_QUANT_SIZES.items():
        mine = GGML_TYPES[int(number)]
        assert (mine.name, mine.block, mine.block_bytes) == (number.name, block, size)


def test_digest_covers_only_the_header(path: Path) -> None:
    data = bytearray(valid_file(path))
    first = read_gguf(path).digest
    data[-1] ^= 1
    assert read(path, bytes(data)).digest == first
    data[40] ^= 1
    assert read(path, bytes(data)).digest != first


def test_arrays_of_arrays_and_all_scalars(path: Path) -> None:
    inner = struct.pack("<IQ2B", 0, 2, 7, 9)
    keys = [
        key("nested", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner + inner),
        key("none", ARRAY, struct.pack("<IQ", STRING, 0)),
        key("u8", 0, b"\xff"),
        key("i8", 1, b"\xff"),
        key("i16", 3, b"\xff\xff"),
        key("bool", 7, b"\x01"),
        key("f64", 12, struct.pack("<d", 0.1)),
        key("i64", 11, struct.pack("<q", -5)),
    ]
    assert read(path, header(keys, [])).metadata == {
        "nested": [[7, 9], [7, 9]],
        "none": [],
        "u8": 255,
        "i8": -1,
        "i16": -1,
        "bool": True,
        "f64": 0.1,
        "i64": -5,
    }


def test_version_2_and_a_scalar_tensor(path: Path) -> None:
    found = read(path, padded(header([], [row("s", [], 0, 0)], version=2), 4))
    assert found.tensors["s"].shape == ()
    assert found.tensors["s"].nbytes == 4


@pytest.mark.parametrize("version", [1, 4, 3 << 24])
def test_other_versions(path: Path, version: int) -> None:
    with pytest.raises(HeaderError, match="big-endian" if version > 99 else f"version {version}"):
        read(path, header([], [], version=version))


def depth(levels: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * levels + struct.pack("<IQ", STRING, 0)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"GGML" + bytes(40), "does not begin with"),
        (header([key("a", 13, b"")], []), "unknown value type 13"),
        (header([key("a", ARRAY, struct.pack("<IQ", 77, 1))], []), "unknown value type 77"),
        (header([key("a", U32, bytes(4))] * 2, []), "appears twice"),
        (header([key("a", ARRAY, depth(9))], []), "nested"),
        (header([key("a", ARRAY, depth(3000))], []), "nested"),
        (header([key("a", STRING, text(b"\xff\xfe"))], []), "not UTF-8"),
        (header([text(b"\xff") + struct.pack("<I", 0) + b"1"], []), "not UTF-8"),
        (header([text("a")[:-1]], [], counts=(0, 2**60)), "invalid count"),
        (header([], [], counts=(2**64 - 1, 0)), "invalid count"),
        (header([struct.pack("<Q", 2**63) + bytes(5)], []), "invalid length"),
        (header([key("a", STRING, struct.pack("<Q", 2**64 - 1))], []), "invalid length"),
        (header([key("a", ARRAY, struct.pack("<IQ", STRING, 2**61))], []), "invalid count"),
        (header([key("a", ARRAY, struct.pack("<IQ", U32, 2**62))], []), "invalid count"),
        (header([key("general.alignment", U32, struct.pack("<I", 0))], []), "power of two"),
        (header([key("general.alignment", U32, struct.pack("<I", 24))], []), "power of two"),
        (header([key("general.alignment", STRING, text("32"))], []), "power of two"),
        (padded(header([], [row("t", [4], 999, 0)]), 64), "unknown type 999"),
        (padded(header([], [row("t", [1] * 5, 0, 0)]), 64), "5 dimensions"),
        (header([], [text("t") + struct.pack("<I", 2**32 - 1) + bytes(99)]), "dimensions"),
        (padded(header([], [row("t", [33], 8, 0)]), 64), "is not a multiple"),
        (padded(header([], [row("t", [4], 0, 0)] * 2), 64), "appears twice"),
        (padded(header([], [row("t", [4], 0, 16)]), 64), "multiple of 32"),
        (padded(header([], [row("t", [16], 0, 0), row("u", [16], 0, 32)]), 128), "overlap"),
        (padded(header([], [row("t", [2**63], 0, 0)]), 64), "tensor 't' is too large"),
        (padded(header([], [row("t", [4], 0, 2**64 - 32)]), 64), "tensor 't' is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_header_is_refused(path: Path, data: bytes, why: str) -> None:
    with pytest.raises(HeaderError, match=why) as caught:
        read(path, data)
    assert "\n" not in str(caught.value)


def test_single_byte_after_the_last_tensor_is_detected(path: Path) -> None:
    whole = valid_file(path)
    end = max(tensor.offset + tensor.nbytes for tensor in read_gguf(path).tensors.values())
    filled = whole[:end] + bytes(-end % 32)
    read(path, filled)
    with pytest.raises(HeaderError, match="1 unused bytes after"):
        read(path, filled + b"\0")


def test_every_truncation_is_detected(path: Path) -> None:
    whole = valid_file(path)
    end = max(tensor.offset + tensor.nbytes for tensor in read_gguf(path).tensors.values())
    for size in [*range(0, 400), *range(end - 9, end)]:
        why = r"cut short|not a GGUF|invalid (length|count)"
        with pytest.raises((TruncatedError, HeaderError), match=why):
            read(path, whole[:size])
    with pytest.raises(TruncatedError, match=f"at least {end:,} bytes.*has {end - 1:,}; download it again"):
        read(path, whole[: end - 1])


def test_an_empty_file_is_called_empty(path: Path) -> None:
    with pytest.raises(TruncatedError, match=r"cut short: the file is empty; download it again$"):
        read(path, b"")


def test_large_vocabulary(path: Path) -> None:
    tokens = [f"token{number}" for number in range(49_152)]
    value = struct.pack("<IQ", STRING, len(tokens)) + b"".join(map(text, tokens))
    assert read(path, header([key("tokens", ARRAY, value)], [])).metadata["tokens"] == tokens


def test_header_over_the_limit(path: Path) -> None:
    with path.open("wb") as file:  # sparse: no disk is used
        file.write(header([], [], counts=(0, 1)) + struct.pack("<Q", MAX_HEADER))
        file.truncate(2 * MAX_HEADER)
    with pytest.raises(HeaderError, match="invalid length"):
        read_gguf(path)
    with pytest.raises(TruncatedError):  # large dimensions need no large allocations
        read(path, padded(header([], [row("t", [2**40, 2**40, 2**40], 0, 0)]), 64))


def test_unreadable_file(path: Path) -> None:
    for place, why in ((path, "No such file"), (path.parent, "directory")):
        with pytest.raises(CheckpointError, match=why):
            read_gguf(place)


def check_only_our_errors(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        found = read_gguf(path)
    except OffspecError as error:
        assert "\n" not in str(error)
        return
    end = 0
    for tensor in sorted(found.tensors.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
        assert tensor.nbytes == 0 or end <= tensor.offset
        assert tensor.nbytes == 0 or tensor.offset + tensor.nbytes <= len(data)
        end = max(end, tensor.offset + tensor.nbytes)


_NUMBERS = st.one_of(st.integers(0, 70), st.sampled_from([2**31, 2**32, 2**62, 2**63, 2**64 - 1]))
_ROWS = st.builds(
    row,
    st.sampled_from(["a", "b", "c"]),
    st.lists(_NUMBERS, max_size=5),
    st.integers(0, 42),
    _NUMBERS.map(lambda number: number // 2 * 32 % 2**64),
)
_KEYS = st.builds(
    key, st.sampled_from(["a", "b", "general.alignment"]), st.integers(0, 14), st.binary(max_size=30)
)


@given(keys=st.lists(_KEYS, max_size=3), rows=st.lists(_ROWS, max_size=4), data=st.integers(0, 4000))
@settings(max_examples=120)
def test_random_tables(scratch: Path, keys: list[bytes], rows: list[bytes], data: int) -> None:
    check_only_our_errors(scratch, padded(header([], rows), data))
    check_only_our_errors(scratch, padded(header(keys, rows), data))

"""Reading and validating the header of a GGUF file (versions 2 and 3, little-endian).

The layout is: magic, version and two counts; the metadata, key by key; a table of tensors; and, from the next
multiple of the alignment on, the data. Only the header is read here.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from offspec.checkpoint.ranges import check_ranges, damaged, one_line, truncated
from offspec.core.errors import HeaderError
from offspec.core.files import FileStamp, open_to_read

MAX_HEADER = 128 * 2**20  # a vocabulary of 262k tokens with its merges takes about 15 MB
MAX_DIMS = 4
MAX_DEPTH = 4  # nesting of arrays
_MAX_INT = 2**63 - 1
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_COUNT = struct.Struct("<Q")
_KIND = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A tensor type: rows are split into blocks of `block` values, `block_bytes` bytes each."""

    id: int
    name: str
    block: int
    block_bytes: int

    @property
    def quantized(self) -> bool:
        return self.block > 1


GGML_TYPES = {
    kind.id: kind
    for kind in (
        GgmlType(0, "F32", 1, 4),
        GgmlType(1, "F16", 1, 2),
        GgmlType(2, "Q4_0", 32, 18),
        GgmlType(3, "Q4_1", 32, 20),
        GgmlType(6, "Q5_0", 32, 22),
        GgmlType(7, "Q5_1", 32, 24),
        GgmlType(8, "Q8_0", 32, 34),
        GgmlType(9, "Q8_1", 32, 40),
        GgmlType(10, "Q2_K", 256, 84),
        GgmlType(11, "Q3_K", 256, 110),
        GgmlType(12, "Q4_K", 256, 144),
        GgmlType(13, "Q5_K", 256, 176),
        GgmlType(14, "Q6_K", 256, 210),
        GgmlType(15, "Q8_K", 256, 292),
        GgmlType(16, "IQ2_XXS", 256, 66),
        GgmlType(17, "IQ2_XS", 256, 74),
        GgmlType(18, "IQ3_XXS", 256, 98),
        GgmlType(19, "IQ1_S", 256, 50),
        GgmlType(20, "IQ4_NL", 32, 18),
        GgmlType(21, "IQ3_S", 256, 110),
        GgmlType(22, "IQ2_S", 256, 82),
        GgmlType(23, "IQ4_XS", 256, 136),
        GgmlType(24, "I8", 1, 1),
        GgmlType(25, "I16", 1, 2),
        GgmlType(26, "I32", 1, 4),
        GgmlType(27, "I64", 1, 8),
        GgmlType(28, "F64", 1, 8),
        GgmlType(29, "IQ1_M", 256, 56),
        GgmlType(30, "BF16", 1, 2),
        GgmlType(34, "TQ1_0", 256, 54),
        GgmlType(35, "TQ2_0", 256, 66),
        GgmlType(39, "MXFP4", 32, 17),
        GgmlType(40, "NVFP4", 64, 36),
        GgmlType(41, "Q1_0", 128, 18),
    )
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file. `shape` is row-major, as in torch; `offset` is from the file's start."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int
    stamp: FileStamp | None = field(default=None, compare=False, repr=False)

    @property
    def values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Contents of a GGUF header.

    Args:
        path: The file, or the first part of a split model.
        version: Version of the format.
        metadata: Values by key.
        tensors: Tensors by name.
        digest: Hash of the header's bytes, in hex.
        files: The file, or all parts of a split model.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    digest: str
    files: tuple[Path, ...]


def special_id(header: GgufHeader, name: str) -> int | None:
    """Return a special token id by its metadata name ("bos", "eos", "padding", "eot", …).

    Returns None if it is absent or out of range. Raises HeaderError if it is not an integer.
    """
    number = header.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is None:
        return None
    if type(number) is not int:
        damaged(header.path, f"the {name} token id is {str(number)[:40]!r}")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    return number if isinstance(tokens, list) and 0 <= number < len(tokens) else None


def read_gguf(path: Path | str) -> GgufHeader:
    """Read the metadata and the tensor table of a GGUF file.

    Every range lies inside the file and has the size of its shape and type. Ranges follow one another without
    overlaps or gaps, as llama.cpp requires: a wrong type would leave a gap. Raises HeaderError for an invalid
    header, TruncatedError for a file that is too short, and CheckpointError if it cannot be read.
    """
    path = Path(path)
    with open_to_read(path) as file:
        return _read(path, file)


def _read(path: Path, file: BinaryIO) -> GgufHeader:
    reader = _Reader(path, file)
    magic = reader.take(4)
    if magic != b"GGUF":
        raise HeaderError(f"{path} is not a GGUF file: it does not begin with the letters GGUF")
    version = reader.kind()
    if version not in (2, 3):
        big = " (big-endian)" if version in (2 << 24, 3 << 24) else ""
        raise HeaderError(
            f"{path} is GGUF version {version}{big}: only versions 2 and 3, little-endian, can be read"
        )
    tensor_count, key_count = reader.count(24), reader.count(13)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = reader.string()
        if key in metadata:
            damaged(path, f"the key {key[:100]!r} appears twice")
        metadata[key] = reader.value(reader.kind(), 0)
    rows = [_table_row(reader) for _ in range(tensor_count)]
    start = -(-reader.position // (alignment := _alignment(path, metadata))) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in rows:
        if name in tensors:
            damaged(path, f"tensor {name[:100]!r} appears twice")
        if offset % alignment:
            damaged(path, f"tensor {name[:100]!r} does not start at a multiple of {alignment}")
        nbytes = _nbytes(path, name, kind, shape)
        tensors[name] = GgufTensor(name, kind, shape, path, start + offset, nbytes, reader.stamp)
    check_ranges(path, tensors.values(), reader.size)
    _check_gaps(path, tensors.values(), start, alignment, reader.size)
    return GgufHeader(path, version, metadata, tensors, reader.digest(), (path,))


def _check_gaps(path: Path, tensors: Iterable[GgufTensor], start: int, alignment: int, size: int) -> None:
    """Raise unless each tensor begins at the first multiple of the alignment after the previous tensor."""
    due, last = start, "the header"
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes)):
        if tensor.offset != due:
            damaged(path, f"{tensor.offset - due} unused bytes between {last} and {tensor.name[:100]!r}")
        end = tensor.offset + tensor.nbytes
        due, last = -(-end // alignment) * alignment, repr(tensor.name[:100])
    if size > due:
        damaged(path, f"{size - due} unused bytes after {last}")


def _alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        damaged(path, f"general.alignment is {str(alignment)[:40]!r}, not a power of two")
    return alignment


def _table_row(reader: _Reader) -> tuple[str, GgmlType, tuple[int, ...], int]:
    """Read name, type, row-major shape, and offset in the data section."""
    name = reader.string()
    shown = repr(name[:100])
    dims = reader.kind()
    if dims > MAX_DIMS:
        damaged(reader.path, f"tensor {shown} has {dims} dimensions")
    shape = struct.unpack(f"<{dims}Q", reader.take(8 * dims))[::-1]  # the file lists the fastest axis first
    number = reader.kind()
    (offset,) = _COUNT.unpack(reader.take(8))
    kind = GGML_TYPES.get(number)
    if kind is None:
        damaged(reader.path, f"tensor {shown} has the unknown type {number}")
    if offset > _MAX_INT or any(size > _MAX_INT for size in shape):
        damaged(reader.path, f"tensor {shown} is too large")
    return name, kind, shape, offset


def _nbytes(path: Path, name: str, kind: GgmlType, shape: tuple[int, ...]) -> int:
    row = shape[-1] if shape else 1
    if row % kind.block:
        damaged(
            path, f"tensor {name[:100]!r}: row size {row} is not a multiple of {kind.name}'s {kind.block}"
        )
    return math.prod(shape) // kind.block * kind.block_bytes


class _Reader:
    """Sequential reader of a header that stays within the file and the header limit."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.stamp = FileStamp.of(file.fileno())
        self.size = self.stamp.size
        self.position = 0
        self._read = file.read
        self._hash = hashlib.sha256()
        self._limit = min(self.size, MAX_HEADER)

    def digest(self) -> str:
        return self._hash.hexdigest()

    def take(self, length: int) -> bytes:
        if length > self._limit - self.position:
            self._too_long(length)
        data = self._read(length)
        if len(data) != length:  # the file shrank while it was read
            raise truncated(self.path, self.position + length, self.position + len(data))
        self.position += length
        self._hash.update(data)
        return data

    def _too_long(self, length: int) -> NoReturn:
        """Raise for a truncated file if the length is plausible for its size, else for a damaged header."""
        end = self.position + length
        if (length > self.size and self.position >= 24) or end > MAX_HEADER:
            damaged(self.path, f"invalid length {length} at byte {self.position}")
        raise truncated(self.path, end, self.size)

    def kind(self) -> int:
        (value,) = _KIND.unpack(self.take(4))
        return int(value)

    def count(self, least: int) -> int:
        """Read a count of items of at least `least` bytes each; refuse it if they could not all fit."""
        (value,) = _COUNT.unpack(self.take(8))
        if value * least > MAX_HEADER:
            damaged(self.path, f"invalid count {value} at byte {self.position - 8}")
        if value * least > self.size - self.position:
            raise truncated(self.path, self.position + value * least, self.size)
        return int(value)

    def string(self) -> str:
        (length,) = _COUNT.unpack(self.take(8))
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as error:
            damaged(self.path, f"a string at byte {self.position - length} is not UTF-8 ({one_line(error)})")

    def value(self, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(depth)
        form = self._form(kind)
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def _form(self, kind: int) -> str:
        form = _SCALARS.get(kind)
        if form is None:
            damaged(self.path, f"the unknown value type {kind} at byte {self.position - 4}")
        return form

    def _array(self, depth: int) -> list[Any]:
        if depth == MAX_DEPTH:
            damaged(self.path, f"arrays nested more than {MAX_DEPTH} deep at byte {self.position}")
        kind = self.kind()
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8))]
        if kind == _ARRAY:
            return [self._array(depth + 1) for _ in range(self.count(12))]
        form = self._form(kind)
        width = struct.calcsize(f"<{form}")
        count = self.count(width)
        return list(struct.unpack(f"<{count}{form}", self.take(count * width)))

"""A GGUF file taken apart and put together again, with every length and offset right.

What is changed in between reaches the code behind the header's checks.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

STRING, ARRAY, BOOL, FLOAT, LONG = 8, 9, 7, 6, 11
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = 32
_MOST_BYTES = 2**20  # of a tensor whose shape was changed


@dataclass(slots=True)
class Entry:
    """A key of the metadata. inner: the kind of an array's elements."""

    key: str
    kind: int
    value: Any
    inner: int = STRING


@dataclass(slots=True)
class Tensor:
    """A tensor. dims: as the file has them, the fastest one first."""

    name: str
    dims: list[int]
    kind: int
    data: bytes

    def fit(self) -> None:
        """Give it as many bytes as its shape and type ask for."""
        size = _nbytes(self.dims, self.kind)
        if size is not None and size <= _MOST_BYTES:
            self.data = (self.data * (size // max(len(self.data), 1) + 1))[:size].ljust(size, b"\0")


def parse(data: bytes) -> tuple[list[Entry], list[Tensor]]:
    """Metadata and tensors. Raises ValueError for what is no GGUF file."""
    try:
        return _parse(_Source(data))
    except (struct.error, KeyError, UnicodeDecodeError) as error:
        raise ValueError("no GGUF file") from error


def _parse(source: _Source) -> tuple[list[Entry], list[Tensor]]:
    if source.take("<4sI") != (b"GGUF", 3):
        raise ValueError("no GGUF file")
    tensors, keys = source.take("<QQ")
    if max(tensors, keys) > 10_000:
        raise ValueError("no GGUF file")
    entries = [_entry(source) for _ in range(keys)]
    rows = []
    for _ in range(tensors):
        name = source.text()
        (count,) = source.take("<I")
        dims = list(source.take(f"<{min(count, 8)}Q"))
        rows.append((name, dims, *source.take("<IQ")))
    start = -(-source.at // _ALIGNMENT) * _ALIGNMENT
    found = []
    for name, dims, kind, offset in rows:
        size = _nbytes(dims, kind) or 0
        found.append(Tensor(name, dims, kind, source.data[start + offset :][:size]))
    return entries, found


def _entry(source: _Source) -> Entry:
    key = source.text()
    (kind,) = source.take("<I")
    if kind != ARRAY:
        return Entry(key, kind, source.value(kind))
    inner, count = source.take("<IQ")
    if count > 100_000:
        raise ValueError("no GGUF file")
    return Entry(key, kind, [source.value(inner) for _ in range(count)], inner)


def join(entries: list[Entry], tensors: list[Tensor]) -> bytes:
    """The file. Values that their kind has no room for lose their upper bits."""
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries))]
    for entry in entries:
        parts += [_text(entry.key), struct.pack("<I", entry.kind)]
        if entry.kind == ARRAY:
            parts += [struct.pack("<IQ", entry.inner, len(entry.value))]
            parts += [_packed(entry.inner, value) for value in entry.value]
        else:
            parts.append(_packed(entry.kind, entry.value))
    offset = 0
    for tensor in tensors:
        parts += [_text(tensor.name), struct.pack("<I", len(tensor.dims))]
        parts += [struct.pack("<Q", size % 2**64) for size in tensor.dims]
        parts.append(struct.pack("<IQ", tensor.kind, offset))
        offset += len(_aligned(tensor.data))
    return _aligned(b"".join(parts)) + b"".join(_aligned(tensor.data) for tensor in tensors)


def _packed(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value if isinstance(value, str) else repr(value))
    letter = SCALARS[kind]
    number = value if isinstance(value, int | float) else 0
    if letter in "fd":
        try:
            return bytes(struct.pack(f"<{letter}", number))
        except OverflowError:
            return bytes(struct.pack(f"<{letter}", math.inf))
    if letter == "?":
        return struct.pack("<?", bool(number))
    width = struct.calcsize(letter)
    whole = int(number) if math.isfinite(number) else 0
    upper: int = 2 ** (8 * width)
    return (whole % upper).to_bytes(width, "little")


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _aligned(data: bytes) -> bytes:
    return data + bytes(-len(data) % _ALIGNMENT)


def _nbytes(dims: list[int], kind: int) -> int | None:
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        return None
    return math.prod(dims) // block * size


class _Source:
    """Bytes taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return found

    def text(self) -> str:
        (size,) = self.take("<Q")
        self.at += size
        if self.at > len(self.data):
            raise ValueError("no GGUF file")
        return self.data[self.at - size : self.at].decode("utf-8", "surrogatepass")

    def value(self, kind: int) -> Any:
        return self.text() if kind == STRING else self.take(f"<{SCALARS[kind]}")[0]

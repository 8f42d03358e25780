"""The header of a safetensors file, read without trusting any of it.

A file is 8 bytes of header length, that many bytes of JSON, then the data. The JSON maps each tensor to
its dtype, its shape and its byte range in the data. Nothing but the header is read here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from offspec.checkpoint.ranges import check_ranges, damaged, one_line, truncated
from offspec.checkpoint.tensors import DTYPE_BITS, TensorInfo, bytes_of
from offspec.core.errors import CheckpointError, HeaderError

MAX_HEADER = 100_000_000  # the limit of the reference implementation
MAX_DIMS = 16
_MAX_INT = 2**63 - 1


def read_header(path: Path | str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors of a safetensors file and its metadata.

    Every range lies inside the file, none overlap, and each has the size of its shape and dtype.
    Raises HeaderError for a header that cannot be believed, TruncatedError for a file that ends too
    early, CheckpointError when it cannot be read.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            text = _header_text(path, file, size)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error
    header = _parse(path, text)
    metadata = _metadata(path, header.pop("__metadata__", {}))
    start = 8 + len(text)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    check_ranges(path, tensors.values(), size)
    return tensors, metadata


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    """The JSON part of the file, whose length is believed only when the file and the limit allow it."""
    if size < 10:  # the length, and the shortest header there is
        raise truncated(path, 10, size)
    length = int.from_bytes(file.read(8), "little")
    first = file.read(1)
    if first != b"{" or length > MAX_HEADER:
        _not_safetensors(path, file)
    if 8 + length > size:
        raise truncated(path, 8 + length, size)
    if length < 2:
        damaged(path, "its header is empty")
    text = first + file.read(length - 1)
    if len(text) < length:  # the file shrank meanwhile
        raise truncated(path, 8 + length, 8 + len(text))
    return text


def _not_safetensors(path: Path, file: BinaryIO) -> NoReturn:
    file.seek(0)
    if file.read(24).startswith(b"version https://git-lfs"):
        raise HeaderError(f"{path} is a git-lfs pointer and not the model: run `git lfs pull` in its folder")
    raise HeaderError(f"{path} is not a safetensors file: it does not begin with a header; download it again")


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{twice[:100]!r} appears twice")
        return found

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a JSON value")

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError, MemoryError) as error:  # ValueError: not UTF-8, not JSON, a huge int
        damaged(path, one_line(error))
    if not isinstance(header, dict):
        damaged(path, f"it is a JSON {type(header).__name__} and not an object")
    return header


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        damaged(path, "__metadata__ must map names to strings")
    return metadata


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    shown = repr(name[:100])
    try:
        name.encode()
    except UnicodeEncodeError:  # "\ud800" is legal JSON, but no name that could ever be printed
        damaged(path, f"the tensor name {shown} is not Unicode")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        damaged(path, f"tensor {shown} must have dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        damaged(path, f"tensor {shown} has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        damaged(path, f"tensor {shown} has no valid shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        damaged(path, f"tensor {shown} has no valid data_offsets")
    begin, end = offsets
    if begin > end:
        damaged(path, f"tensor {shown} ends at {end}, before its begin {begin}")
    try:
        expected = bytes_of(dtype, tuple(shape))
    except ValueError as error:
        damaged(path, f"{shown}: {error}")
    if end - begin != expected:
        damaged(path, f"tensor {shown} is {dtype} {shape}, {expected} bytes, but has {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, end - begin)


def _is_size(value: object) -> bool:
    """A plain int from 0 to 2^63 - 1; bool is an int in Python, and no size."""
    return type(value) is int and 0 <= value <= _MAX_INT

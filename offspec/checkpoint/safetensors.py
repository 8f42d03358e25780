"""Reading and validating the header of a safetensors file.

A file is 8 bytes of header length, that many bytes of JSON, then the data. The JSON maps each tensor to its
dtype, its shape and its byte range in the data. Only the header is read here, and all of it is validated.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NoReturn

from msgspec import Meta

from offspec.checkpoint.ranges import check_ranges, damaged, one_line, truncated
from offspec.checkpoint.tensors import DTYPE_BITS, TensorInfo, nbytes_of
from offspec.core.errors import HeaderError
from offspec.core.files import FileStamp, open_to_read
from offspec_planners.json_fields import Whole, read

MAX_HEADER = 100_000_000  # the limit of the reference implementation
MAX_DIMS = 16


def read_header(path: Path | str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Read the tensors of a safetensors file and its metadata.

    Every range lies inside the file, no two overlap, and each has the size of its shape and dtype. Raises
    HeaderError for an invalid header, TruncatedError for a file that is too short, and CheckpointError if it
    cannot be read.
    """
    path = Path(path)
    with open_to_read(path) as file:
        stamp = FileStamp.of(file.fileno())
        text = _header_text(path, file, stamp.size)
    header = _parse(path, text)
    metadata = _metadata(path, header.pop("__metadata__", {}))
    start = 8 + len(text)
    tensors = {name: _tensor(path, name, entry, start, stamp) for name, entry in header.items()}
    check_ranges(path, tensors.values(), stamp.size)
    return tensors, metadata


def _header_text(path: Path, file: BinaryIO, size: int) -> bytes:
    """Return the JSON part of the file, after checking its length against the file and the limit."""
    if size < 10:  # the length field and the shortest header
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
    if len(text) < length:  # the file shrank while it was read
        raise truncated(path, 8 + length, 8 + len(text))
    return text


def _not_safetensors(path: Path, file: BinaryIO) -> NoReturn:
    file.seek(0)
    if file.read(24).startswith(b"version https://git-lfs"):
        raise HeaderError(f"{path} is a git-lfs pointer, not the model: run `git lfs pull` in its folder")
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
        damaged(path, f"it is a JSON {type(header).__name__}, not an object")
    return header


def _metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        damaged(path, "__metadata__ must map names to strings")
    return metadata


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPE_BITS)})\Z", description="a dtype of the format")]
    shape: Annotated[
        tuple[Whole, ...], Meta(max_length=MAX_DIMS, description=f"a list of at most {MAX_DIMS} sizes")
    ]
    data_offsets: Annotated[tuple[Whole, Whole], Meta(description="where its bytes begin and end")]


def _tensor(path: Path, name: str, entry: object, start: int, stamp: FileStamp) -> TensorInfo:
    shown = repr(name[:100])
    try:
        name.encode()  # "\ud800" is legal JSON, but such a name cannot be printed
        found = read(entry, _Entry)
        expected = nbytes_of(found.dtype, found.shape)
    except ValueError as error:
        damaged(path, f"tensor {shown}: {error}")
    begin, end = found.data_offsets
    if end - begin != expected:
        shape = list(found.shape)
        damaged(path, f"tensor {shown} is {found.dtype} {shape}, {expected} bytes, but has {end - begin}")
    return TensorInfo(name, found.dtype, found.shape, path, start + begin, expected, stamp)

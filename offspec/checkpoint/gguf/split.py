"""Reading a GGUF model from one file, or from the parts that llama.cpp split it into, in the same folder."""

import hashlib
import re
from pathlib import Path

from offspec.checkpoint.gguf.header import GgufHeader, GgufTensor, read_gguf
from offspec.checkpoint.ranges import damaged
from offspec.core.errors import MissingTensorError, UnsupportedModelError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def read_model(path: Path) -> GgufHeader:
    """Return the header of a whole model: of its single file, or of all its parts joined.

    path: the file, or any of the parts, whose names end in -00001-of-00003.gguf and so on. Raises the errors
    of `read_gguf`, MissingTensorError for an absent part, HeaderError for parts that do not belong together,
    UnsupportedModelError for a part whose name does not identify the others.
    """
    named = read_gguf(path)
    count = _number(named, "count")
    if count <= 1:
        return named
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UnsupportedModelError(
            f"{path} is one of {count} parts: restore its original name (model-00001-of-{count:05}.gguf)"
        )
    if int(match[3]) != count:
        damaged(path, f"it is one of {count} parts")
    parts = []
    for number in range(1, count + 1):
        file = path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        if not file.exists():
            raise MissingTensorError(f"{file} is missing (part {number} of {count}): download it there")
        parts.append(named if file == path else read_gguf(file))
        if _number(parts[-1], "count") != count or _number(parts[-1], "no") != number - 1:
            damaged(file, f"it is not part {number} of {count}")
    return _joined(parts)


def _number(header: GgufHeader, key: str) -> int:
    """Return a number from the keys of a split file; zero if absent."""
    value = header.metadata.get(f"split.{key}", 0)
    if type(value) is not int:
        damaged(header.path, f"split.{key} is {str(value)[:40]!r}")
    return value


def _joined(parts: list[GgufHeader]) -> GgufHeader:
    """Join the parts' headers. The first has all the metadata; the others have only their numbers."""
    first = parts[0]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            damaged(part.path, f"tensor {twice[0][:100]!r} is in another part too")
        tensors |= part.tensors
    expected = _number(first, "tensors.count")
    if len(tensors) != expected:
        damaged(first.path, f"it declares {expected} tensors, and all parts together have {len(tensors)}")
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    files = tuple(part.path for part in parts)
    return GgufHeader(first.path, first.version, first.metadata, tensors, digest, files)

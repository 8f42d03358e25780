"""A GGUF model in one file, or split by llama.cpp into parts that lie beside each other."""

import hashlib
import re
from pathlib import Path

from offspec.checkpoint.gguf.header import GgufHeader, GgufTensor, read_gguf
from offspec.checkpoint.ranges import damaged
from offspec.core.errors import MissingTensorError, UnsupportedModelError

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.ASCII | re.DOTALL)


def read_model(path: Path) -> GgufHeader:
    """The header of a whole model: that of its one file, or of all of its parts as one.

    path: the file, or any of the parts, whose names end in -00001-of-00003.gguf and so on. Raises what
    `read_gguf` raises, MissingTensorError for a part that is not there, HeaderError for parts that do not
    belong together, UnsupportedModelError for one whose name does not lead to the others.
    """
    named = read_gguf(path)
    count = _number(named, "count")
    if count <= 1:
        return named
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UnsupportedModelError(
            f"{path} is one of {count} parts: give it its own name again (model-00001-of-{count:05}.gguf)"
        )
    if int(match[3]) != count:
        damaged(path, f"it is one of {count} parts")
    parts = []
    for number in range(1, count + 1):
        file = path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf")
        if not file.exists():
            raise MissingTensorError(f"{file} is missing, part {number} of {count}: download it to its place")
        parts.append(named if file == path else read_gguf(file))
        if _number(parts[-1], "count") != count or _number(parts[-1], "no") != number - 1:
            damaged(file, f"it is not part {number} of {count}")
    return _joined(parts)


def _number(header: GgufHeader, key: str) -> int:
    """A number of the keys that a split file has; nought where it has none."""
    value = header.metadata.get(f"split.{key}", 0)
    if type(value) is not int:
        damaged(header.path, f"split.{key} is {str(value)[:40]!r}")
    return value


def _joined(parts: list[GgufHeader]) -> GgufHeader:
    """The parts as one header. The first has all the metadata, the others nothing but their numbers."""
    first = parts[0]
    tensors: dict[str, GgufTensor] = {}
    for part in parts:
        if twice := sorted(tensors.keys() & part.tensors.keys()):
            damaged(part.path, f"tensor {twice[0][:100]!r} is in another part too")
        tensors |= part.tensors
    expected = _number(first, "tensors.count")
    if len(tensors) != expected:
        damaged(first.path, f"it states {expected} tensors, and all parts together have {len(tensors)}")
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    files = tuple(part.path for part in parts)
    return GgufHeader(first.path, first.version, first.metadata, tensors, digest, files)

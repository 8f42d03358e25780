"""The manifest of a pack: what a model was packed from, how, and what the bytes of each file must be.

A pack is a model folder like any other whose matrices are stored in fewer bits. This module knows how the
manifest is written and read; `quantised.packs` opens a pack by it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from offspec.checkpoint.checksum import FileSum
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError, HeaderError

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

MANIFEST = "offspec-pack.json"
METHOD = "offspec"  # the quant_method in a pack's config.json
VERSION = 1  # raise it when packs of before can no longer be read, or would be made otherwise
FORMATS: tuple[PackFormat, ...] = get_args(PackFormat)

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """What a pack is made from, and to what. model: as the user named it; fingerprint: of its checkpoint."""

    model: str
    fingerprint: str
    format: PackFormat

    def matches(self, other: Origin) -> bool:
        """Whether both make the same bytes, whatever the model was called."""
        return (self.fingerprint, self.format) == (other.fingerprint, other.format)

    def again(self, folder: Path) -> str:
        """The command that makes the pack in `folder` again, to go into an error."""
        words = ("offspec", "pack", self.model, "--to", self.format, "--out", str(folder))
        return f"run `{' '.join(map(quoted, words))}` again"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of a pack: the checksums of its bytes, and the shapes of the weights that are packed in it."""

    sum: FileSum
    weights: Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a pack. files: by name; of an unfinished pack those that are finished.

    texts: the sums of all its other files but the manifest, by name; packs of before have none.
    """

    origin: Origin
    files: Mapping[str, PackedFile]
    texts: Mapping[str, FileSum] = field(default_factory=dict)

    @property
    def sums(self) -> dict[str, FileSum]:
        """What the bytes of every file must be, by name."""
        return {name: file.sum for name, file in self.files.items()} | dict(self.texts)

    def to_text(self) -> str:
        """As it lies in the folder, laid out to be read."""
        files = {
            name: {
                **asdict(file.sum),
                "weights": {weight: list(shape) for weight, shape in file.weights.items()},
            }
            for name, file in self.files.items()
        }
        texts = {name: asdict(text) for name, text in self.texts.items()}
        value = {"version": VERSION, **asdict(self.origin), "files": files, "texts": texts}
        return json.dumps(value, indent=1) + "\n"


def format_of(name: PackFormat) -> Format:
    """How the weights of a pack are stored."""
    import torch

    from offspec_kernels.dequant.codebook import Codebook
    from offspec_kernels.dequant.grouped import Grouped

    if name == "nf4":
        return Codebook("nf4", 64, absmax=torch.float16)
    return Grouped(8 if name == "int8" else 4)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack. Raises HeaderError for one that is absent, damaged, or of another version."""
    from offspec.checkpoint.json_file import read_json

    path = folder / MANIFEST
    try:
        value = read_json(path)
        version = value.get("version")
        if version != VERSION:
            raise HeaderError(f"{path} is of version {str(version)[:20]}, and this offspec reads {VERSION}")
        origin = Origin(_name(value, "model"), _text(value, "fingerprint"), _format(value))
        files = {_file_name(name): _file(entry) for name, entry in _object(value, "files").items()}
        texts = _object(value, "texts") if "texts" in value else {}
        sums = {_plain_name(name): _sum(entry) for name, entry in texts.items()}
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise HeaderError(
            f"{path} is no manifest that can be used ({_reason(error, path)}): {_remedy(folder)}"
        ) from error
    return Manifest(origin, files, sums)


def quoted(text: str) -> str:
    """A word of a shell's command line; characters that do not print are bytes in `$'…'`."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def _remedy(folder: Path) -> str:
    place = quoted(str(folder))
    return f"remove {place}, and make it anew with `offspec pack MODEL --to FORMAT --out {place}`"


def _reason(error: Exception, path: Path) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error.args[0]!r}"
    return str(error).removeprefix(f"{path} ").removesuffix("; download it again")


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value[key]
    if not isinstance(found, dict):
        raise ValueError(f"{key!r} must be an object")
    return found


def _name(value: dict[str, Any], key: str) -> str:
    """Text as a user may have typed it, or named a folder: with any character that a path may hold."""
    found = value[key]
    if not isinstance(found, str):
        raise ValueError(f"{key!r} must be text")
    os.fsencode(found)  # a ValueError for what is no path
    return found


def _text(value: dict[str, Any], key: str) -> str:
    found = _name(value, key)
    if not found.isprintable():
        raise ValueError(f"{key!r} must be text that prints")
    return found


def _format(value: dict[str, Any]) -> PackFormat:
    found = _text(value, "format")
    for known in FORMATS:
        if found == known:
            return known
    raise ValueError(f"the format {found[:40]!r} is none of {', '.join(FORMATS)}")


def _plain_name(name: str) -> str:
    """A name that cannot lead out of its folder."""
    os.fsencode(name)  # a ValueError for what is no path
    if name in ("", "..") or "\0" in name or os.path.basename(name) != name:
        raise ValueError(f"{name[:100]!r} is no file name")
    return name


def _file_name(name: str) -> str:
    if not name.endswith(".safetensors") or not name.isprintable() or set(name) & set("/\\:"):
        raise ValueError(f"{name[:100]!r} is no file name of a pack")
    return name


def _file(entry: Any) -> PackedFile:
    found = _sum(entry)
    return PackedFile(found, {name: _shape(shape) for name, shape in _object(entry, "weights").items()})


def _sum(entry: Any) -> FileSum:
    if not isinstance(entry, dict):
        raise ValueError("a file must be an object")
    size, start, crc32 = (_size(entry[key]) for key in ("size", "start", "crc32"))
    return FileSum(size, start, crc32, _text(entry, "blake2b"))


def _shape(value: Any) -> Shape:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("a packed weight must have a shape of two dimensions or more")
    return tuple(map(_size, value))


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value

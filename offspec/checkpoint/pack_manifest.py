"""Manifest of a pack: the model it was made from, the format, and the checksum of each file.

A pack is an ordinary model folder with quantized matrices. This module reads and writes the manifest;
`quantized.packs` uses it to open a pack.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from msgspec import Meta

from offspec.checkpoint.checksum import FileChecksum, Printable
from offspec.checkpoint.json_file import read_json
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError, HeaderError, ModelNotFoundError
from offspec_planners.json_fields import Whole, check_version, read

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

MANIFEST = "offspec-pack.json"
METHOD = "offspec"  # the quant_method in a pack's config.json
VERSION = 1  # increase it if older packs can no longer be read or would be written differently
FORMATS: tuple[PackFormat, ...] = get_args(PackFormat)

Shape = Annotated[tuple[Whole, ...], Meta(min_length=2, description="a shape of two dimensions or more")]


@dataclass(frozen=True, slots=True)
class Origin:
    """Source and format of a pack. model: its user-given name; fingerprint: hash of its checkpoint."""

    model: str
    fingerprint: str
    format: PackFormat

    def matches(self, other: Origin) -> bool:
        """Return whether both produce the same bytes, regardless of the model's name."""
        return (self.fingerprint, self.format) == (other.fingerprint, other.format)

    def pack_command(self, folder: Path) -> str:
        """Return the shell command that remakes the pack in `folder`, for an error message."""
        words = ("offspec", "pack", self.model, "--to", self.format, "--out", str(folder))
        return f"run `{' '.join(map(quoted, words))}` again"


@dataclass(frozen=True, slots=True)
class PackedFile:
    """One file of a pack: its checksum, and the shapes of the quantized weights in it."""

    checksum: FileChecksum
    weights: Mapping[str, Shape]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of a pack.

    Args:
        origin: Source and format.
        files: Weight files by name; in an unfinished pack only the finished ones.
        texts: Checksums by name of all other files except the manifest; empty in older packs.
    """

    origin: Origin
    files: Mapping[str, PackedFile]
    texts: Mapping[str, FileChecksum] = field(default_factory=dict)

    @property
    def checksums(self) -> dict[str, FileChecksum]:
        """Checksums of all files by name."""
        return {name: file.checksum for name, file in self.files.items()} | dict(self.texts)

    def to_text(self) -> str:
        """Return the manifest as indented JSON."""
        files = {
            name: {
                **asdict(file.checksum),
                "weights": {weight: list(shape) for weight, shape in file.weights.items()},
            }
            for name, file in self.files.items()
        }
        texts = {name: asdict(text) for name, text in self.texts.items()}
        value = {"version": VERSION, **asdict(self.origin), "files": files, "texts": texts}
        return json.dumps(value, indent=1) + "\n"


def format_of(name: PackFormat) -> Format:
    """Return the storage format of a pack's weights."""
    import torch

    from offspec_kernels.dequant.codebook import Codebook
    from offspec_kernels.dequant.grouped import Grouped

    if name == "nf4":
        return Codebook("nf4", 64, absmax=torch.float16)
    return Grouped(8 if name == "int8" else 4)


def check_pack(folder: Path) -> None:
    """Check that a folder exists and has a manifest. Raises ModelNotFoundError."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no folder {folder}: name the folder of a pack")
    if not (folder / MANIFEST).is_file():
        raise ModelNotFoundError(f"{folder} is not a pack: it has no {MANIFEST}")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a pack. Raises HeaderError if it is absent, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        value = check_version(read_json(path), "version", VERSION, "a manifest")
        saved = read(value, _Saved, partial=True)
        os.fsencode(saved.model)  # a user-given name may contain any character that a path may contain
        files = {name: _file(name, entry) for name, entry in saved.files.items()}
        sums = {
            _plain_name(name): read(entry, FileChecksum, f"texts[{name!r}].")
            for name, entry in saved.texts.items()
        }
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix(f"{path} ").removesuffix("; download it again")
        place = quoted(str(folder))
        raise HeaderError(
            f"{path} is not a usable manifest ({reason}): "
            f"remove {place}, and remake it with `offspec pack MODEL --to FORMAT --out {place}`"
        ) from error
    return Manifest(Origin(saved.model, saved.fingerprint, saved.format), files, sums)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A manifest file, apart from its format version."""

    model: str
    fingerprint: Printable
    format: Annotated[PackFormat, Meta(description=f"one of {', '.join(FORMATS)}")]
    files: dict[str, Any]
    texts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SavedFile(FileChecksum):
    weights: dict[str, Shape]


def _file(name: str, entry: object) -> PackedFile:
    if not name.endswith(".safetensors") or not name.isprintable() or set(name) & set("/\\:"):
        raise ValueError(f"{name[:100]!r} is not a file name of a pack")
    found = read(entry, _SavedFile, f"files[{name!r}].")
    return PackedFile(FileChecksum(found.size, found.start, found.crc32, found.blake2b), found.weights)


def _plain_name(name: str) -> str:
    """Return the name if it cannot lead out of its folder. Raises ValueError."""
    os.fsencode(name)  # raises ValueError if it is not a valid path
    if name in ("", "..") or "\0" in name or os.path.basename(name) != name:
        raise ValueError(f"{name[:100]!r} is not a file name")
    return name


def quoted(text: str) -> str:
    """Quote a word for a shell's command line; unprintable characters become bytes in `$'…'`."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))

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
from typing import TYPE_CHECKING, Annotated, Any, get_args

from msgspec import Meta

from offspec.checkpoint.checksum import FileSum, Printable
from offspec.checkpoint.json_file import read_json
from offspec.core.config import PackFormat
from offspec.core.errors import CheckpointError, HeaderError, ModelNotFoundError
from offspec_planners.json_fields import Whole, read, without_version

if TYPE_CHECKING:
    from offspec_kernels.dequant import Format

MANIFEST = "offspec-pack.json"
METHOD = "offspec"  # the quant_method in a pack's config.json
VERSION = 1  # raise it when packs of before can no longer be read, or would be made otherwise
FORMATS: tuple[PackFormat, ...] = get_args(PackFormat)

Shape = Annotated[tuple[Whole, ...], Meta(min_length=2, description="a shape of two dimensions or more")]


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


def check_pack(folder: Path) -> None:
    """See that a folder is there and says that it holds a pack. Raises ModelNotFoundError."""
    if not folder.is_dir():
        raise ModelNotFoundError(f"there is no folder {folder}: name the folder of a pack")
    if not (folder / MANIFEST).is_file():
        raise ModelNotFoundError(f"{folder} is no pack: it has no {MANIFEST}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a pack. Raises HeaderError for one that is absent, damaged, or of another version."""
    path = folder / MANIFEST
    try:
        value = without_version(read_json(path), "version", VERSION, "a manifest")
        saved = read(value, _Saved, partial=True)
        os.fsencode(saved.model)  # as a user may have typed it: with any character that a path may hold
        files = {name: _file(name, entry) for name, entry in saved.files.items()}
        sums = {
            _plain_name(name): read(entry, FileSum, f"texts[{name!r}].")
            for name, entry in saved.texts.items()
        }
    except (CheckpointError, ValueError) as error:
        reason = str(error).removeprefix(f"{path} ").removesuffix("; download it again")
        place = quoted(str(folder))
        raise HeaderError(
            f"{path} is no manifest that can be used ({reason}): "
            f"remove {place}, and make it again with `offspec pack MODEL --to FORMAT --out {place}`"
        ) from error
    return Manifest(Origin(saved.model, saved.fingerprint, saved.format), files, sums)


@dataclass(frozen=True, slots=True)
class _Saved:
    """A manifest in its file, besides the version of its format."""

    model: str
    fingerprint: Printable
    format: Annotated[PackFormat, Meta(description=f"one of {', '.join(FORMATS)}")]
    files: dict[str, Any]
    texts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _SavedFile(FileSum):
    weights: dict[str, Shape]


def _file(name: str, entry: object) -> PackedFile:
    if not name.endswith(".safetensors") or not name.isprintable() or set(name) & set("/\\:"):
        raise ValueError(f"{name[:100]!r} is no file name of a pack")
    found = read(entry, _SavedFile, f"files[{name!r}].")
    return PackedFile(FileSum(found.size, found.start, found.crc32, found.blake2b), found.weights)


def _plain_name(name: str) -> str:
    """A name that cannot lead out of its folder."""
    os.fsencode(name)  # a ValueError for what is no path
    if name in ("", "..") or "\0" in name or os.path.basename(name) != name:
        raise ValueError(f"{name[:100]!r} is no file name")
    return name


def quoted(text: str) -> str:
    """A word of a shell's command line; characters that do not print are bytes in `$'…'`."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped, text))}'"


def _escaped(char: str) -> str:
    if char.isprintable() and char not in "\\'":
        return char
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))

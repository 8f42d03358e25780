"""Packs made by `offspec pack`, opened by their manifest.

A weight `X` is stored in tensors `X.codes`, `X.absmax` and so on, one for each part of its format.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offspec.checkpoint.checksum import FileChecksum, find_damage
from offspec.checkpoint.pack_manifest import MANIFEST, Manifest, Shape, format_of, quoted, read_manifest
from offspec.checkpoint.quantized.common import FoundWeight, Tensors
from offspec.checkpoint.tensors import PackedInfo, torch_dtype
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, TruncatedError


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[FoundWeight]:
    """Yield the quantized weights in the manifest next to the tensors' files. Raises HeaderError."""
    folder = next(iter(tensors.values())).file.parent
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        for weight, shape in file.weights.items():
            found = _find(folder, manifest, weight, shape, tensors)
            if any(part.file.name != name for _, part in found.parts):
                raise _foreign(folder, manifest, f"{weight[:200]} is not in {name}")
            yield FoundWeight(found, frozenset(part.name for _, part in found.parts))


def check_files(folder: Path) -> None:
    """Check that all files of a pack are intact: weight files by size, the others by checksum.

    Raises HeaderError for an unusable manifest, MissingTensorError, TruncatedError, and CheckpointError for
    any other changed file.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise MissingTensorError(f"{path} is missing: {manifest.origin.pack_command(folder)}") from error
        if size != file.checksum.size:
            raise TruncatedError(
                f"{path} has {size:,} bytes instead of {file.checksum.size:,}: "
                f"{manifest.origin.pack_command(folder)}"
            )
    for name, text in manifest.texts.items():
        if how := find_damage(folder / name, text, forget=False):
            whole = str(folder / name)  # the name may contain a line break
            shown = whole if whole.isprintable() else quoted(whole)
            raise CheckpointError(f"{shown} {how}: {manifest.origin.pack_command(folder)}")


def checksums(folder: Path) -> tuple[dict[Path, FileChecksum], str]:
    """Return the checksum of each file and the advice if one differs; empty for a folder that is not a pack.

    A layer's file holds nothing else, so its `crc32` covers exactly the bytes of the layer. Raises
    HeaderError.
    """
    if not (folder / MANIFEST).exists():
        return {}, ""
    manifest = read_manifest(folder)
    return {
        folder / name: file.checksum for name, file in manifest.files.items()
    }, manifest.origin.pack_command(folder)


def _find(folder: Path, manifest: Manifest, name: str, shape: Shape, tensors: Tensors) -> PackedInfo:
    from offspec_kernels.dequant import Part
    from offspec_kernels.errors import ArgumentError

    stored = format_of(manifest.origin.format)
    try:
        wanted = stored.parts(shape)
        found = {part: tensors[f"{name}.{part}"] for part in wanted if f"{name}.{part}" in tensors}
        stored.check({part: Part(torch_dtype(info.dtype), info.shape) for part, info in found.items()}, shape)
    except ArgumentError as error:
        raise _foreign(folder, manifest, f"{name[:200]}: {error}") from error
    return PackedInfo(name, shape, stored, tuple(found.items()))


def _foreign(folder: Path, manifest: Manifest, why: str) -> HeaderError:
    return HeaderError(
        f"{folder / MANIFEST} does not match the files in its folder ({why}): "
        f"{manifest.origin.pack_command(folder)}"
    )

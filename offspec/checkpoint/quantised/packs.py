"""Packs that `offspec pack` made: opened by their manifest.

A weight `X` lies in tensors `X.codes`, `X.absmax` and so on, one for each part of its format.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offspec.checkpoint.checksum import FileSum, damage
from offspec.checkpoint.pack_manifest import MANIFEST, Manifest, Shape, format_of, quoted, read_manifest
from offspec.checkpoint.quantised.parts import Found, Tensors
from offspec.checkpoint.tensors import PackedInfo, torch_dtype
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, TruncatedError


def find(settings: Mapping[str, Any], tensors: Tensors) -> Iterator[Found]:
    """The packed weights that the manifest beside the tensors' files lists. Raises HeaderError."""
    folder = next(iter(tensors.values())).file.parent
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        for weight, shape in file.weights.items():
            found = _find(folder, manifest, weight, shape, tensors)
            if any(part.file.name != name for _, part in found.parts):
                raise _foreign(folder, manifest, f"{weight[:200]} does not lie in {name}")
            yield Found(found, frozenset(part.name for _, part in found.parts))


def check_files(folder: Path) -> None:
    """See that all files of a pack are there: those of weights of the right size, the others as written.

    What is in files of weights is not looked at. Raises HeaderError for a manifest that cannot be used,
    MissingTensorError, TruncatedError, and CheckpointError for another file that is not as it was.
    """
    manifest = read_manifest(folder)
    for name, file in manifest.files.items():
        path = folder / name
        try:
            size = path.stat().st_size
        except OSError as error:
            raise MissingTensorError(f"{path} is missing: {manifest.origin.again(folder)}") from error
        if size != file.sum.size:
            raise TruncatedError(
                f"{path} has {size:,} bytes instead of {file.sum.size:,}: {manifest.origin.again(folder)}"
            )
    for name, text in manifest.texts.items():
        if how := damage(folder / name, text, forget=False):
            whole = str(folder / name)  # of a name that may hold a line break
            shown = whole if whole.isprintable() else quoted(whole)
            raise CheckpointError(f"{shown} {how}: {manifest.origin.again(folder)}")


def checksums(folder: Path) -> tuple[dict[Path, FileSum], str]:
    """What the bytes of each file must be, and what to do where they are not; nothing for what is no pack.

    A layer's file holds nothing else, so the bytes of a layer are all that its `crc32` is of. Raises
    HeaderError.
    """
    if not (folder / MANIFEST).exists():
        return {}, ""
    manifest = read_manifest(folder)
    return {folder / name: file.sum for name, file in manifest.files.items()}, manifest.origin.again(folder)


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
        f"{folder / MANIFEST} does not belong to the files beside it ({why}): {manifest.origin.again(folder)}"
    )

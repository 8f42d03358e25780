"""Tensors from a pickle, read only by torch's restricted loader."""

import pickle
import re
import zipfile
from pathlib import Path
from typing import NoReturn

import torch

from offspec.checkpoint.ranges import one_line
from offspec.core.errors import CheckpointError, DraftError, HeaderError, OffspecError
from offspec.core.files import as_read_error
from offspec_planners.units import format_bytes

PICKLED = (".pt", ".bin", ".pth")
_ZIP = b"PK\x03\x04"  # torch's format since 1.6
_OLDER = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's format before that: a magic number, pickled
_POINTER = b"version https://git-lfs"
_LARGEST_PICKLE = 4_000_000  # bytes of tensor descriptions inside a zip, some hundreds for each tensor
_LARGEST_OLDER = 512_000_000  # bytes of a file that cannot be mapped


def read_pickle(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a `.pt`, `.bin` or `.pth` file by name.

    They are memory-mapped, except in files of torch before 1.6, which are read whole and refused above half a
    gigabyte. Raises DraftError for those, and for a pickle that contains more than tensors and plain
    containers or unpacks to more than its size on disk; HeaderError for one that is damaged or truncated;
    CheckpointError if it cannot be read or holds no tensors.
    """
    with as_read_error(path), path.open("rb") as file:
        start = file.read(len(_POINTER))
    if not start.startswith((_ZIP, _OLDER)):
        _not_of_torch(path, start)
    mapped = start.startswith(_ZIP)
    try:
        if mapped:
            _check_entries(path)
        elif (size := path.stat().st_size) > _LARGEST_OLDER:
            raise DraftError(
                f"{path} is of a format before torch 1.6, which has to be read whole ({format_bytes(size)}): "
                "convert it to safetensors"
            )
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OffspecError:
        raise
    except Exception as error:  # torch's reader raises many kinds of errors for damage
        _refuse(path, error)
    items = found.items() if isinstance(found, dict) else ()
    tensors = {name: value.detach() for name, value in items if isinstance(name, str) and _is_plain(value)}
    if not tensors:
        raise CheckpointError(f"{path} holds no tensors by name: name the file that is the head")
    return tensors


def _check_entries(path: Path) -> None:
    """Refuse a zip that would unpack to more than the file itself: torch compresses no tensors."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            pickled = entry.filename.endswith(".pkl")
            if entry.compress_type != zipfile.ZIP_STORED or (pickled and entry.file_size > _LARGEST_PICKLE):
                raise DraftError(
                    f"{path} holds {entry.filename[:60]!r} compressed or far too large, as no file of plain "
                    "tensors does, and was not opened: download it again, or use another head"
                )


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and not value.is_quantized
    )


def _not_of_torch(path: Path, start: bytes) -> NoReturn:
    if start.startswith(_POINTER):
        raise HeaderError(f"{path} is a git-lfs pointer and not the head: run `git lfs pull` in its folder")
    if start.startswith(b"\x80"):
        raise DraftError(
            f"{path} is a pickle that torch did not write; it could run code and was not opened: "
            "convert it to safetensors where it is trusted, or use another head"
        )
    raise HeaderError(f"{path} is damaged: it does not begin as torch's files do; download it again")


def _refuse(path: Path, error: Exception) -> NoReturn:
    asked = re.search(r"GLOBAL (\S+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and asked:
        raise DraftError(
            f"{path} asks for {asked[1][:80]}, which is no tensor and could run code, and was not opened: "
            "download it again if it was cut short, else convert it to safetensors where it is trusted"
        ) from error
    raise HeaderError(f"{path} is damaged or cut short ({one_line(error, 80)}); download it again") from error

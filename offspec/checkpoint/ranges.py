"""Byte-range checks shared by both header formats, and their errors."""

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn, Protocol

from offspec.core.errors import HeaderError, TruncatedError
from offspec_planners.units import format_bytes

# Advice for a GGUF file that cannot be unpacked to its original model.
INSTEAD = "name the model's safetensors folder or hub id"


class Ranged(Protocol):
    """Something with a name and a byte range in a file, `offset` from the file's start."""

    @property
    def name(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


def check_ranges(path: Path, tensors: Iterable[Ranged], size: int) -> None:
    """Raise unless the ranges are disjoint and inside a file of `size` bytes."""
    end, last = 0, ""
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        if tensor.nbytes == 0:
            continue
        if tensor.offset < end:
            damaged(path, f"tensors {last!r} and {tensor.name!r} overlap")
        end, last = tensor.offset + tensor.nbytes, tensor.name
    if end > size:
        raise truncated(path, end, size)


def truncated(path: Path, needed: int, size: int) -> TruncatedError:
    """Return the error for a file of `size` bytes that should have at least `needed`."""
    if not size:
        return TruncatedError(f"{path} is cut short: the file is empty; download it again")
    return TruncatedError(
        f"{path} is cut short: it should hold at least {needed:,} bytes ({format_bytes(needed)}) "
        f"and has {size:,}; download it again"
    )


def damaged(path: Path, what: str) -> NoReturn:
    """Raise HeaderError for an invalid header, with the reason."""
    raise HeaderError(f"{path} has a damaged header: {what}; download it again")


def one_line(error: BaseException, limit: int = 200) -> str:
    """Return an error's text on one line, or its type if the text is empty."""
    return " ".join(str(error).split())[:limit] or type(error).__name__

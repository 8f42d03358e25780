"""Files to measure a disk with: large ones that are there, or one that is written and removed again."""

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offspec.core.cache_dir import ELSEWHERE, cache_root
from offspec.core.files import disk_full, require_space, writing

_WRITTEN = 512 << 20  # bytes of a test file, where there is no large one to read
_BLOCK = 4 << 20
_ENOUGH = 256 << 20  # bytes of files that are large enough to read instead
_LARGE = 4 << 20  # bytes of a file that is worth reading


def in_folder(folder: Path) -> Iterator[Path]:
    """What is in a folder, and one folder deeper."""
    for path in _listed(folder):
        yield path
        yield from _listed(path)


def in_caches() -> Iterator[Path]:
    """Weights that are kept by offspec and by the hub's client."""
    from huggingface_hub import constants

    for room in _listed(cache_root()):
        for folder in _listed(room):
            yield from (file for file in _listed(folder) if file.suffix == ".safetensors")
    for model in _listed(Path(constants.HF_HUB_CACHE)):
        if model.name.startswith("models--"):
            yield from _listed(model / "blobs")


def _listed(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is none, is closed to us, or was removed meanwhile."""
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def large_files(found: Iterable[Path]) -> list[Path]:
    """Those that are large and lie on one disk, the largest first; none where they hold too little."""
    disks = dict[int, list[tuple[int, Path]]]()
    for path in found:
        try:
            about = path.stat()
        except OSError:  # a link into nowhere, a folder that is closed to us
            continue
        if path.is_file() and about.st_size >= _LARGE and os.access(path, os.R_OK):
            disks.setdefault(about.st_dev, []).append((about.st_size, path))
    if not disks:
        return []
    chosen = max(disks.values(), key=lambda files: sum(size for size, _ in files))
    if sum(size for size, _ in chosen) < _ENOUGH:
        return []
    return [path for _, path in sorted(chosen, reverse=True)]


def made_folder(folder: Path) -> Path:
    """The folder, which is made where there is none. Raises CheckpointError."""
    with writing(folder, ELSEWHERE):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def written_file(folder: Path, fix: str, variable: str = "OFFSPEC_CACHE") -> Iterator[Path]:
    """A large file to read. It has no name, so that nothing is left of it however this ends.

    fix: what to do where none can be written, for the error; variable: what names another folder, for that of
    a full disk. Raises CheckpointError, DiskFullError.
    """
    require_space(folder, _WRITTEN, "measuring the disk", variable)
    with (
        writing(folder, fix),
        disk_full(folder, _WRITTEN),
        tempfile.TemporaryFile(dir=folder) as file,
    ):
        block = os.urandom(_BLOCK)  # zeros might never reach the disk
        for _ in range(_WRITTEN // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        yield Path(f"/proc/self/fd/{file.fileno()}")

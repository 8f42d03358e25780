"""Cache folders, each created once and atomically by the first process that needs it."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offspec.core.file_lock import lock_for, release
from offspec.core.files import (
    as_disk_full_error,
    as_write_error,
    atomic_folder,
    partial_name,
    removed_on_exit,
)

_PARTIAL = ".partial"
# Folders of the cache that hold weights.
PACKED, QUANTIZED, UNPACKED, WIDENED = "packed", "rounded", "unpacked", "widened"
PREFIXES = "prefixes"  # folder of the conversations' KV caches
ELSEWHERE = "set OFFSPEC_CACHE to another folder"


def cache_root(given: Path | None = None) -> Path:
    """Return the cache folder: as given, else from $OFFSPEC_CACHE, $XDG_CACHE_HOME or ~/.cache."""
    if given:
        return given
    return user_folder("OFFSPEC_CACHE", "XDG_CACHE_HOME", ".cache")


def user_folder(ours: str, theirs: str, usual: str) -> Path:
    """Return a folder for user data: from the variable `ours`, else "offspec" in the folder of `theirs`.

    usual: default of `theirs`, relative to the home folder.
    """
    if chosen := os.environ.get(ours):
        return Path(chosen).expanduser()
    base = os.environ.get(theirs, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / usual) / "offspec"


def cache_folder(root: Path, name: str, key: str) -> Path:
    """Return the folder in `root` for a key, whatever the model was called when the folder was created.

    Args:
        root: Part of the cache.
        name: Name of the model, used as the readable first part of a new folder's name.
        key: Hash of the content, used as the last part.
    """
    with suppress(OSError):
        for folder in sorted(root.glob(f"[!.]*-{key}")):
            if folder.is_dir():
                return folder
    shown = re.sub(r"[^\w.-]", "_", name)[:80]
    return root / f"{shown}-{key}"


def make_folder(folder: Path, fill: Callable[[Path], None], waiting: Callable[[], None]) -> None:
    """Create `folder` by calling `fill` with a temporary folder next to it, which is renamed when complete.

    If another process is creating the folder, call `waiting` and wait for that process. Leftovers of killed
    processes are removed. An error or an interrupt in `fill` leaves no files. Raises DiskFullError, or
    CheckpointError if nothing can be written.
    """
    with lock_folder(folder, waiting):
        _sweep(folder.parent, folder.name)
        if not folder.exists():
            with atomic_folder(folder) as partial:
                fill(partial)


@contextmanager
def lock_folder(folder: Path, waiting: Callable[[], None], fix: str = ELSEWHERE) -> Iterator[None]:
    """Hold the lock for creating `folder` while the block runs. Creates the folder's parent.

    Raises DiskFullError, or CheckpointError if nothing can be written.

    Args:
        folder: Folder to create.
        waiting: Called if another process holds the lock.
        fix: Advice in the error if nothing can be written.
    """
    from filelock import Timeout

    with as_write_error(folder.parent, fix), as_disk_full_error(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_for(folder)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    try:
        with removed_on_exit(Path(lock.lock_file)):
            yield
    finally:
        release(lock)


def remove_folder(folder: Path) -> None:
    """Delete a folder from the cache. It is renamed first, so that it never exists in part."""
    grave = partial_name(folder)
    with removed_on_exit(grave), suppress(FileNotFoundError):
        os.rename(folder, grave)
        shutil.rmtree(grave, ignore_errors=True)


def _sweep(root: Path, own: str) -> None:
    """Remove partial folders that no live process is filling: our own, and those whose lock is free."""
    from filelock import Timeout

    for partial in root.glob(f".*{_PARTIAL}"):
        key = partial.name[1 : -len(_PARTIAL)].rpartition(".")[0]
        if key == own:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        with suppress(Timeout, OSError):
            lock = lock_for(root / key)
            lock.acquire(timeout=0)
            shutil.rmtree(partial, ignore_errors=True)
            release(lock)

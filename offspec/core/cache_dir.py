"""Folders that are made once, whole or not at all, by whichever process comes first."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from offspec.core.file_lock import lock_beside, release
from offspec.core.files import disk_full, new_folder, partial_name, unfinished, writing

_PARTIAL = ".partial"
# Folders of the cache that hold weights.
PACKED, ROUNDED, UNPACKED, WIDENED = "packed", "rounded", "unpacked", "widened"
PREFIXES = "prefixes"  # the folder that holds keys and values of conversations
ELSEWHERE = "set OFFSPEC_CACHE to another folder"


def cache_root(given: Path | None = None) -> Path:
    """Where offspec keeps what it makes: as given, else $OFFSPEC_CACHE, $XDG_CACHE_HOME, ~/.cache."""
    if given:
        return given
    return user_folder("OFFSPEC_CACHE", "XDG_CACHE_HOME", ".cache")


def user_folder(ours: str, theirs: str, usual: str) -> Path:
    """A folder for what is the user's: named by our environment variable, else "offspec" in that of theirs.

    usual: what theirs is called in the home folder where no variable names it.
    """
    if chosen := os.environ.get(ours):
        return Path(chosen).expanduser()
    base = os.environ.get(theirs, "")
    return (Path(base) if os.path.isabs(base) else Path.home() / usual) / "offspec"


def folder_of(root: Path, name: str, key: str) -> Path:
    """The folder in `root` that belongs to a key, whatever its model was called when it was made.

    Args:
        root: Part of the cache.
        name: Name of the model, which begins the name of a new folder for people to read.
        key: Hash of the content, which ends it.
    """
    with suppress(OSError):
        for folder in sorted(root.glob(f"[!.]*-{key}")):
            if folder.is_dir():
                return folder
    shown = re.sub(r"[^\w.-]", "_", name)[:80]
    return root / f"{shown}-{key}"


def make_folder(folder: Path, fill: Callable[[Path], None], waiting: Callable[[], None]) -> None:
    """Make `folder` by calling `fill` with a partial folder beside it, which is renamed when whole.

    Of two processes the second waits (after calling `waiting`) and finds the folder made. Whatever a
    killed process left behind is removed. Raises DiskFullError, or CheckpointError where nothing can be
    written; an error or an interrupt in `fill` leaves nothing.
    """
    with claim_folder(folder, waiting):
        _sweep(folder.parent, folder.name)
        if not folder.exists():
            with new_folder(folder) as partial:
                fill(partial)


@contextmanager
def claim_folder(folder: Path, waiting: Callable[[], None], fix: str = ELSEWHERE) -> Iterator[None]:
    """The right to make `folder`, while the block runs; makes the folder's parent.

    Raises DiskFullError, CheckpointError where nothing can be written.

    Args:
        folder: to be made.
        waiting: called where another process has the right now.
        fix: what to do where nothing can be written, for the error.
    """
    from filelock import Timeout

    with writing(folder.parent, fix), disk_full(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_beside(folder)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            waiting()
            lock.acquire()
    try:
        with unfinished(Path(lock.lock_file)):
            yield
    finally:
        release(lock)


def remove_folder(folder: Path) -> None:
    """Take a folder out of the cache: by renaming first, so that it is never half there."""
    grave = partial_name(folder)
    with unfinished(grave), suppress(FileNotFoundError):
        os.rename(folder, grave)
        shutil.rmtree(grave, ignore_errors=True)


def _sweep(root: Path, own: str) -> None:
    """Remove partial folders that no living process is filling: ours, and those whose lock is free."""
    from filelock import Timeout

    for partial in root.glob(f".*{_PARTIAL}"):
        key = partial.name[1 : -len(_PARTIAL)].rpartition(".")[0]
        if key == own:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        with suppress(Timeout, OSError):
            lock = lock_beside(root / key)
            lock.acquire(timeout=0)
            shutil.rmtree(partial, ignore_errors=True)
            release(lock)

"""Permissions of folders with user conversations, including folders that an earlier version left readable."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from offspec.core.cache_dir import PREFIXES, cache_root, user_folder
from offspec.core.events import Event, Notice

DISTILL, RESPONSES = "distill", "responses"  # folders of the cache
PRIVATE = 0o600
_FOLDER = 0o700
_OTHERS = 0o077


def data_root() -> Path:
    """Return the conversation folder: $OFFSPEC_DATA, $XDG_DATA_HOME/offspec or ~/.local/share/offspec."""
    return user_folder("OFFSPEC_DATA", "XDG_DATA_HOME", ".local/share")


def restrict_permissions(notify: Callable[[Event], None], cache: Path | None = None) -> None:
    """Remove other users' access to these folders, with a notice if they had any.

    Never raises: files of another user stay unchanged.
    """
    roots = [cache_root(cache) / name for name in (PREFIXES, DISTILL, RESPONSES)]
    roots += [data_root() / name for name in ("sessions", "batches")]
    if opened := [root for root in roots if _restrict_folder(root)]:
        notify(Notice(f"other users could read {', '.join(map(str, opened))}; restricted to you"))


def _restrict_folder(folder: Path) -> bool:
    """Restrict a folder; return whether other users could read anything in it. Follows no links."""
    found = False
    with suppress(OSError):
        for path, mode, wanted, readable in _open_to_others(folder):
            path.chmod(mode & wanted)
            found |= readable
    return found


def _open_to_others(place: Path, reached: bool = True) -> Iterator[tuple[Path, int, int, bool]]:
    """Yield the path, mode, permitted mode bits and whether other users could read it, for our open files.

    The folder comes first. Empty files, such as locks, and files in a closed folder count as unreadable.

    Args:
        place: File or folder.
        reached: Whether other users could reach it.
    """
    about = place.lstat()
    mode = stat.S_IMODE(about.st_mode)
    ours = about.st_uid == os.getuid()
    if stat.S_ISDIR(about.st_mode):
        if ours and mode & _OTHERS:
            yield place, mode, _FOLDER, reached
        for inner in sorted(place.iterdir()):
            yield from _open_to_others(inner, reached and bool(mode & _OTHERS))
    elif stat.S_ISREG(about.st_mode) and ours and mode & _OTHERS:
        yield place, mode, PRIVATE, reached and about.st_size > 0

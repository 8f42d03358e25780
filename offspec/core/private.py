"""Folders that hold what users said: theirs alone, also where an earlier version or a copy left them open."""

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
    """Where offspec keeps what was said: $OFFSPEC_DATA, $XDG_DATA_HOME/offspec, ~/.local/share/offspec."""
    return user_folder("OFFSPEC_DATA", "XDG_DATA_HOME", ".local/share")


def tighten(notify: Callable[[Event], None], cache: Path | None = None) -> None:
    """Take the rights of other users away from these folders, with a notice where they had some.

    Raises nothing: what is another user's stays as it is.
    """
    roots = [cache_root(cache) / name for name in (PREFIXES, DISTILL, RESPONSES)]
    roots += [data_root() / name for name in ("sessions", "batches")]
    if opened := [root for root in roots if _tighten(root)]:
        notify(Notice(f"other users could read {', '.join(map(str, opened))}; now only you can"))


def _tighten(folder: Path) -> bool:
    """Whether others could read something in a folder. No link is followed."""
    found = False
    with suppress(OSError):
        for path, mode, wanted, readable in _open_to_others(folder):
            path.chmod(mode & wanted)
            found |= readable
    return found


def _open_to_others(place: Path, reached: bool = True) -> Iterator[tuple[Path, int, int, bool]]:
    """Path, mode, the most that the mode may be, and whether others could read anything of what is ours.

    The folder comes first. Others can read no empty file, such as a lock, and none in a closed folder.

    Args:
        place: a file or folder.
        reached: whether others could come to it.
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

"""`demo-wide`: the demo model widened ×4, large enough to be streamed, written to the cache on first use."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from offspec.checkpoint.folder import Checkpoint, open_folder
from offspec.checkpoint.widen import SMALL_FILES, write_wide
from offspec.checkpoint.widening import total_bytes, wide_files
from offspec.core.cache_dir import WIDENED, cache_root, make_folder, remove_folder
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice, unheard
from offspec.core.files import require_space
from offspec.core.progress import ByteProgress
from offspec_planners.units import format_bytes

FACTOR = 4
_STAGE = "writing demo-wide"

OpenSmall = Callable[[Path, Callable[[Event], None]], Checkpoint]


def widened_folder(name: str, factor: int, cache_dir: Path | None = None) -> Path:
    """Where a widened model is kept unless a folder is named: in the user's cache."""
    return cache_root(cache_dir) / WIDENED / f"{name}-x{factor}"


def demo_wide_folder(cache_dir: Path | None = None) -> Path:
    """The folder of the wide demo model, written or not."""
    return widened_folder("demo", FACTOR, cache_dir)


def open_demo_wide(
    name: str, open_small: OpenSmall, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open the wide demo model, after writing it if it is missing or damaged.

    Args:
        name: What the model is called.
        open_small: Unpacks the small model into the folder that it is given, telling its progress.
        notify: Takes Notice and LoadProgress events while it is written.
        cache_dir: As `open_checkpoint` has it.

    Raises:
        DiskFullError: There is no room for it.
        CheckpointError: Nothing can be written there, or the small model is not installed.
    """
    folder = demo_wide_folder(cache_dir)
    if folder.exists():
        try:
            return open_folder(folder, name)
        except CheckpointError:  # another process has changed it
            notify(Notice(f"{folder} was damaged and is written again"))
            remove_folder(folder)

    def waiting() -> None:
        notify(Notice(f"another process is writing {name}: waiting for it"))

    make_folder(folder, lambda partial: _fill(partial, folder, name, open_small, notify), waiting)
    return open_folder(folder, name)


def _fill(
    partial: Path, folder: Path, name: str, open_small: OpenSmall, notify: Callable[[Event], None]
) -> None:
    """Write the model to `partial`, which is to become `folder`."""
    scratch = partial / ".small"  # beside its copy, so that both are removed together
    small = open_small(scratch, unheard)
    files = wide_files(small, FACTOR)
    total = total_bytes(files)
    require_space(folder.parent, total + SMALL_FILES, name)
    notify(
        Notice(
            f"writing {name} once: the demo model widened ×{FACTOR}, {total / 2e9:.1f} B parameters, "
            f"{format_bytes(total)} in {folder}; `offspec models rm {name}` removes it"
        )
    )
    progress = ByteProgress(_STAGE, total, notify)
    write_wide(small, partial, files, FACTOR, progress.add)
    shutil.rmtree(scratch)

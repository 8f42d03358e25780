"""Whether every byte of a pack is what was written."""

from collections.abc import Callable
from pathlib import Path

from offspec.checkpoint.checksum import damage
from offspec.checkpoint.folder import open_folder
from offspec.checkpoint.pack_manifest import Manifest, check_pack, read_manifest
from offspec.core.errors import CheckpointError
from offspec.core.events import Event
from offspec.core.progress import ByteProgress


def verify_pack(folder: Path, notify: Callable[[Event], None]) -> Manifest:
    """Read all files of a pack, compare them with its manifest, and return that.

    Args:
        folder: Of the pack.
        notify: Takes LoadProgress events.

    Raises:
        ModelNotFoundError: There is no pack.
        CheckpointError: Names the first file that is wrong and the command that repairs it.
    """
    check_pack(folder)
    manifest = read_manifest(folder)
    files = manifest.sums
    progress = ByteProgress(f"verifying {folder.name}", sum(s.size for s in files.values()), notify)
    wrong = []
    for number, (name, expected) in enumerate(files.items(), 1):
        progress.detail = f"file {number} of {len(files)}"
        if found := damage(folder / name, expected, thorough=True, add=progress.add):
            wrong.append(f"{folder / name} {found}")
    if wrong:
        more = f", and {len(wrong) - 1} more of its {len(files)} files" if len(wrong) > 1 else ""
        raise CheckpointError(f"{wrong[0]}{more}: {manifest.origin.again(folder)}")
    open_folder(folder)
    return manifest

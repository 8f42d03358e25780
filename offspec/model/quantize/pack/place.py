"""The folder that a pack is to be made in, and what is there before."""

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from offspec.checkpoint.checksum import damage
from offspec.checkpoint.folder import open_folder
from offspec.checkpoint.pack_manifest import MANIFEST, VERSION, Manifest, Origin, quoted, read_manifest
from offspec.core.cache_dir import PACKED, cache_root, claim_folder, folder_of
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.events import Event, Notice
from offspec.core.files import real_path, writing
from offspec.core.progress import ByteProgress

Notify = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class PackLocation:
    """Where a pack is to be. cached: under a name that only a pack of the same origin has."""

    folder: Path
    cached: bool

    @classmethod
    def of(cls, out: Path | None, origin: Origin, cache_dir: Path | None) -> "PackLocation":
        """`out`, or a place in the cache. Raises RequestError where no folder can be renamed to `out`."""
        if out is not None:
            folder = real_path(Path(os.path.expanduser(out)))
            if not folder.name or os.path.ismount(folder):
                raise RequestError(f"`out` {folder} is the root of a disk: name a folder in it")
            return cls(folder, cached=False)
        seen = repr((VERSION, origin.fingerprint, origin.format)).encode()
        key = f"{origin.format}-{hashlib.sha256(seen).hexdigest()[:16]}"
        return cls(folder_of(cache_root(cache_dir) / PACKED, Path(origin.model).stem, key), cached=True)

    @property
    def partial(self) -> Path:
        """The folder of an unfinished pack."""
        return self.folder.with_name(f".{self.folder.name}.packing")

    @property
    def setting(self) -> str:
        """What names another place."""
        return "OFFSPEC_CACHE" if self.cached else "`out`"

    def claimed(self, notify: Notify) -> AbstractContextManager[None]:
        """No other process makes this pack in the block. Raises CheckpointError where it cannot write."""
        waiting = Notice(f"another process is making {self.folder}: waiting for it")
        return claim_folder(self.folder, lambda: notify(waiting), f"name another folder by {self.setting}")

    def writing(self) -> AbstractContextManager[None]:
        """Turn an OSError into CheckpointError; for blocks that convert what they read elsewhere."""
        return writing(self.folder.parent, f"name another folder by {self.setting}")

    def there(self, origin: Origin, again: bool, notify: Notify) -> Manifest | None:
        """The manifest of a pack that is there and whole; a damaged one becomes an unfinished one.

        Raises RequestError where the folder is something else, or cannot be known to be this pack.
        """
        if self._is_free():
            return None
        manifest = self._manifest()
        if manifest is not None:
            if not manifest.origin.matches(origin):
                raise RequestError(_other(self.folder, manifest.origin))
            if self._opens() and (not again or _is_whole(self.folder, manifest, notify)):
                return manifest
        notify(Notice(f"{self.folder} was damaged: what is wrong in it is made again"))
        with self.writing():
            shutil.rmtree(self.partial, ignore_errors=True)
            os.rename(self.folder, self.partial)
        return None

    def _is_free(self) -> bool:
        """Whether there is nothing, or an empty folder."""
        try:
            return not any(self.folder.iterdir())
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            raise RequestError(
                f"{self.folder} exists and is no folder: name another by {self.setting}"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"cannot read the folder {self.folder}: {error.strerror or error}"
            ) from error

    def _manifest(self) -> Manifest | None:
        """Of the pack that is there; None for one in the cache that cannot be read."""
        if not os.path.lexists(self.folder / MANIFEST) and not self.cached:
            raise RequestError(f"{self.folder} exists and is no pack: name another folder by {self.setting}")
        try:
            return read_manifest(self.folder)
        except CheckpointError as error:
            if self.cached:
                return None
            raise RequestError(str(error)) from error

    def _opens(self) -> bool:
        try:
            open_folder(self.folder)
        except CheckpointError:
            return False
        return True


def _is_whole(folder: Path, manifest: Manifest, notify: Notify) -> bool:
    """Whether all weights of a pack have their checksums; those of its other files are seen on opening."""
    files = manifest.files
    progress = ByteProgress(f"checking {folder.name}", sum(f.sum.size for f in files.values()), notify)
    return all(damage(folder / name, file.sum, add=progress.add) is None for name, file in files.items())


def _other(folder: Path, origin: Origin) -> str:
    return (
        f"{folder} holds a pack of {quoted(origin.model)} in {origin.format}, or of that model as it was "
        "before: name another folder by `out`, or remove this one"
    )

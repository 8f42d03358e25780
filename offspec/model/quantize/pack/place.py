"""The folder that a pack is to be made in, and what is there before: another pack, or one that is unfinished.

An unfinished pack outlives the process that makes it. Its folder holds the files that are finished, each
whole, and the manifest of these. What makes it a model, config.json and the index, comes last; then it is
renamed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.checksum import FileSum, damage, sum_of
from offspec.checkpoint.folder import CONFIG, INDEX, TEXT_FILES, open_folder
from offspec.checkpoint.pack_manifest import (
    MANIFEST,
    METHOD,
    VERSION,
    Manifest,
    Origin,
    PackedFile,
    quoted,
    read_manifest,
)
from offspec.checkpoint.safetensors import read_header
from offspec.core.cache_dir import PACKED, cache_root, claim_folder, folder_of
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.events import Event, Notice
from offspec.core.files import disk_full, reading, real_path, sync_folder, write_file, writing
from offspec.core.progress import ByteProgress
from offspec.model.quantize.pack.contents import FileContents

_MOST_TEXT = 256 * 2**20

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
                other = f"{quoted(manifest.origin.model)} in {manifest.origin.format}"
                raise RequestError(
                    f"{self.folder} holds a pack of {other}, or of that model as it was before: name another "
                    "folder by `out`, or remove this one"
                )
            if self._opens():
                # Of weights alone: the other files are checked on opening.
                sums = {name: file.sum for name, file in manifest.files.items()}
                if not again or not any(damaged(self.folder, sums, f"checking {self.folder.name}", notify)):
                    return manifest
        notify(Notice(f"{self.folder} was damaged: what is wrong in it is made again"))
        with self.writing():
            shutil.rmtree(self.partial, ignore_errors=True)
            os.rename(self.folder, self.partial)
        return None

    def _opens(self) -> bool:
        try:
            open_folder(self.folder)
        except CheckpointError:
            return False
        return True

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


class Unfinished:
    """Takes up what an earlier run has finished of the same pack; `files` are those, by name.

    Of another pack nothing is kept. A file whose checksum is wrong is not kept either.
    """

    def __init__(
        self, folder: Path, origin: Origin, contents: Sequence[FileContents], notify: Notify
    ) -> None:
        self.folder, self.origin = folder, origin
        self.files: dict[str, PackedFile] = {}
        with disk_full(folder):
            folder.mkdir(exist_ok=True)
        for left in folder.glob(".*.partial"):
            left.unlink(missing_ok=True)
        wanted = {file.name for file in contents}
        found = {name: file for name, file in self._before(notify).items() if name in wanted}
        if found:
            sums = {name: file.sum for name, file in found.items()}
            wrong = dict(damaged(folder, sums, "checking what is finished", notify))
            self.files = {name: file for name, file in found.items() if name not in wrong}

    def _before(self, notify: Notify) -> dict[str, PackedFile]:
        """What the manifest of an earlier run lists, if that was of this pack."""
        if not (self.folder / MANIFEST).exists():
            return {}
        try:
            manifest = read_manifest(self.folder)
        except CheckpointError:
            notify(Notice(f"what was begun in {self.folder} cannot be read: the pack is begun anew"))
            self._clear()
            return {}
        if manifest.origin.matches(self.origin):
            return dict(manifest.files)
        before = f"{quoted(manifest.origin.model)} in {manifest.origin.format}"
        notify(Notice(f"an unfinished pack of {before}, of another state of the files, is dropped"))
        self._clear()
        return {}

    def _clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def add(self, name: str, file: PackedFile) -> None:
        """A file is finished. Raises DiskFullError."""
        files = {**self.files, name: file}
        write_file(self.folder / MANIFEST, Manifest(self.origin, files).to_text().encode())
        self.files = files

    def finish(self, source: Checkpoint, folder: Path) -> Manifest:
        """Write what else a model folder has, and rename it. Raises DiskFullError, CheckpointError."""
        texts = dict[str, FileSum]()

        def write(name: str, data: bytes) -> None:
            write_file(self.folder / name, data)
            texts[name] = sum_of(data)

        for file in _texts(source.folder):
            with reading(file):
                data = file.read_bytes()
            write(file.name, data)
        tensors = {name: list(read_header(self.folder / name)[0]) for name in self.files}
        index = {
            "metadata": {"total_size": sum(file.sum.size for file in self.files.values())},
            "weight_map": {tensor: name for name, of in tensors.items() for tensor in of},
        }
        write(INDEX, _json(index))
        # The model's configuration, which says that these weights are not ordinary ones.
        kept = {key: value for key, value in source.config.items() if key not in ("dtype", "torch_dtype")}
        method = {"quant_method": METHOD, "format": self.origin.format}
        config = _json({**kept, "dtype": "bfloat16", "quantization_config": method})
        manifest = Manifest(self.origin, self.files, {**texts, CONFIG: sum_of(config)})
        write_file(self.folder / MANIFEST, manifest.to_text().encode())
        write_file(self.folder / CONFIG, config)
        sync_folder(self.folder)
        os.rename(self.folder, folder)
        return manifest

    def remove(self) -> None:
        """Keep nothing."""
        self.files = {}
        shutil.rmtree(self.folder, ignore_errors=True)


def _texts(folder: Path) -> list[Path]:
    """What a model has beside its weights and what is written for a pack."""
    with reading(f"the folder {folder}"):
        return sorted(
            file
            for file in folder.iterdir()
            if file.name.endswith(TEXT_FILES)
            and file.name not in (CONFIG, INDEX, MANIFEST)
            and file.is_file()
            and file.stat().st_size <= _MOST_TEXT
        )


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def damaged(
    folder: Path, files: Mapping[str, FileSum], stage: str, notify: Notify, *, thorough: bool = False
) -> Iterator[tuple[str, str]]:
    """Names of files that have not the checksums they should have, and how they differ; `damage` for each."""
    progress = ByteProgress(stage, sum(expected.size for expected in files.values()), notify)
    for number, (name, expected) in enumerate(files.items(), 1):
        progress.detail = f"file {number} of {len(files)}" if thorough else ""
        if found := damage(folder / name, expected, thorough=thorough, add=progress.add):
            yield name, found

"""Folder of a pack, and detection of an existing or partial pack in it.

A partial pack is kept when its process ends. Its folder has the finished files and their manifest. The index
and config.json, which make the folder a model, are written last; then the folder is renamed.
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
from offspec.checkpoint.checksum import FileChecksum, checksum_of, find_damage
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
from offspec.core.cache_dir import PACKED, cache_folder, cache_root, lock_folder
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.events import Event, Notice
from offspec.core.files import (
    as_disk_full_error,
    as_read_error,
    as_write_error,
    real_path,
    sync_folder,
    write_atomic,
)
from offspec.core.progress import ByteProgress
from offspec.model.quantize.pack.contents import FileContents

_MOST_TEXT = 256 * 2**20

Notify = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class PackLocation:
    """Folder of a pack. `cached`: whether its name is unique to packs of the same origin."""

    folder: Path
    cached: bool

    @classmethod
    def of(cls, out: Path | None, origin: Origin, cache_dir: Path | None) -> "PackLocation":
        """Return the location `out`, or one in the cache. Raises RequestError if `out` cannot be a folder."""
        if out is not None:
            folder = real_path(Path(os.path.expanduser(out)))
            if not folder.name or os.path.ismount(folder):
                raise RequestError(f"`out` {folder} is the root of a disk; use a folder in it")
            return cls(folder, cached=False)
        seen = repr((VERSION, origin.fingerprint, origin.format)).encode()
        key = f"{origin.format}-{hashlib.sha256(seen).hexdigest()[:16]}"
        return cls(cache_folder(cache_root(cache_dir) / PACKED, Path(origin.model).stem, key), cached=True)

    @property
    def partial(self) -> Path:
        """Folder of a partial pack."""
        return self.folder.with_name(f".{self.folder.name}.packing")

    @property
    def setting(self) -> str:
        """Setting that chooses another location."""
        return "OFFSPEC_CACHE" if self.cached else "`out`"

    def lock(self, notify: Notify) -> AbstractContextManager[None]:
        """Keep other processes from making this pack in the block. Raises CheckpointError if not writable."""
        waiting = Notice(f"waiting for another process that is making {self.folder}")
        return lock_folder(self.folder, lambda: notify(waiting), f"use another folder with {self.setting}")

    def writing(self) -> AbstractContextManager[None]:
        """Raise an OSError inside the block as CheckpointError; read errors must be handled elsewhere."""
        return as_write_error(self.folder.parent, f"use another folder with {self.setting}")

    def find_existing(self, origin: Origin, again: bool, notify: Notify) -> Manifest | None:
        """Return the manifest of an existing, complete pack; turn a damaged pack into a partial one.

        Args:
            origin: Origin of the pack.
            again: Whether to check the contents of all weight files.
            notify: Receives LoadProgress and Notice events.

        Raises:
            RequestError: The folder is not a pack, or not known to be this pack.
        """
        if self._is_free():
            return None
        manifest = self._manifest()
        if manifest is not None:
            if not manifest.origin.matches(origin):
                other = f"{quoted(manifest.origin.model)} in {manifest.origin.format}"
                raise RequestError(
                    f"{self.folder} already has a pack of {other}, possibly of older files of that model; "
                    "use another folder with `out`, or remove this one"
                )
            if self._opens():
                # Only of weights: the other files are checked on opening.
                sums = {name: file.checksum for name, file in manifest.files.items()}
                if not again or not any(
                    find_damaged_files(self.folder, sums, f"checking {self.folder.name}", notify)
                ):
                    return manifest
        notify(Notice(f"{self.folder} is damaged; its damaged files are made again"))
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
        """Return whether the folder does not exist or is empty."""
        try:
            return not any(self.folder.iterdir())
        except FileNotFoundError:
            return True
        except NotADirectoryError:
            raise RequestError(
                f"{self.folder} exists and is not a folder; use another one with {self.setting}"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"cannot read the folder {self.folder}: {error.strerror or error}"
            ) from error

    def _manifest(self) -> Manifest | None:
        """Return the manifest of the existing pack; None if it is in the cache and cannot be read."""
        if not os.path.lexists(self.folder / MANIFEST) and not self.cached:
            raise RequestError(
                f"{self.folder} exists and is not a pack; use another folder with {self.setting}"
            )
        try:
            return read_manifest(self.folder)
        except CheckpointError as error:
            if self.cached:
                return None
            raise RequestError(str(error)) from error


class PartialPack:
    """Partial pack that resumes from the finished files of an earlier run, `files` by name.

    Files of another pack, and files with a wrong checksum, are not kept.
    """

    def __init__(
        self, folder: Path, origin: Origin, contents: Sequence[FileContents], notify: Notify
    ) -> None:
        self.folder, self.origin = folder, origin
        self.files: dict[str, PackedFile] = {}
        with as_disk_full_error(folder):
            folder.mkdir(exist_ok=True)
        for left in folder.glob(".*.partial"):
            left.unlink(missing_ok=True)
        wanted = {file.name for file in contents}
        found = {name: file for name, file in self._before(notify).items() if name in wanted}
        if found:
            sums = {name: file.checksum for name, file in found.items()}
            wrong = dict(find_damaged_files(folder, sums, "checking finished files", notify))
            self.files = {name: file for name, file in found.items() if name not in wrong}

    def _before(self, notify: Notify) -> dict[str, PackedFile]:
        """Return the files in the manifest of an earlier run, if it made the same pack."""
        if not (self.folder / MANIFEST).exists():
            return {}
        try:
            manifest = read_manifest(self.folder)
        except CheckpointError:
            notify(Notice(f"the partial pack in {self.folder} cannot be read; starting again"))
            self._clear()
            return {}
        if manifest.origin.matches(self.origin):
            return dict(manifest.files)
        before = f"{quoted(manifest.origin.model)} in {manifest.origin.format}"
        notify(Notice(f"discarding a partial pack of {before}, made from other files"))
        self._clear()
        return {}

    def _clear(self) -> None:
        shutil.rmtree(self.folder)
        self.folder.mkdir()

    def add(self, name: str, file: PackedFile) -> None:
        """Record a finished file in the manifest. Raises DiskFullError."""
        files = {**self.files, name: file}
        write_atomic(self.folder / MANIFEST, Manifest(self.origin, files).to_text().encode())
        self.files = files

    def finish(self, source: Checkpoint, folder: Path) -> Manifest:
        """Write the other files of a model folder, and rename it. Raises DiskFullError or CheckpointError."""
        texts = dict[str, FileChecksum]()

        def write(name: str, data: bytes) -> None:
            write_atomic(self.folder / name, data)
            texts[name] = checksum_of(data)

        for file in _texts(source.folder):
            with as_read_error(file):
                data = file.read_bytes()
            write(file.name, data)
        tensors = {name: list(read_header(self.folder / name)[0]) for name in self.files}
        index = {
            "metadata": {"total_size": sum(file.checksum.size for file in self.files.values())},
            "weight_map": {tensor: name for name, of in tensors.items() for tensor in of},
        }
        write(INDEX, _json(index))
        # The model's configuration, with an entry for the quantization of these weights.
        kept = {key: value for key, value in source.config.items() if key not in ("dtype", "torch_dtype")}
        method = {"quant_method": METHOD, "format": self.origin.format}
        config = _json({**kept, "dtype": "bfloat16", "quantization_config": method})
        manifest = Manifest(self.origin, self.files, {**texts, CONFIG: checksum_of(config)})
        write_atomic(self.folder / MANIFEST, manifest.to_text().encode())
        write_atomic(self.folder / CONFIG, config)
        sync_folder(self.folder)
        os.rename(self.folder, folder)
        return manifest

    def remove(self) -> None:
        """Delete the partial pack."""
        self.files = {}
        shutil.rmtree(self.folder, ignore_errors=True)


def _texts(folder: Path) -> list[Path]:
    """Return the model's other files, without weights and the files written for a pack."""
    with as_read_error(f"the folder {folder}"):
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


def find_damaged_files(
    folder: Path, files: Mapping[str, FileChecksum], stage: str, notify: Notify, *, thorough: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the names of files with a wrong checksum, each with the difference found by `find_damage`."""
    progress = ByteProgress(stage, sum(expected.size for expected in files.values()), notify)
    for number, (name, expected) in enumerate(files.items(), 1):
        progress.detail = f"file {number} of {len(files)}" if thorough else ""
        if found := find_damage(folder / name, expected, thorough=thorough, add=progress.add):
            yield name, found

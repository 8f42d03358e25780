"""The folder of a pack that is being made, which outlives the process that makes it.

It holds the files that are finished, each whole, and the manifest of these. What makes it a model,
config.json and the index, comes last; then it is renamed.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offspec.checkpoint import Checkpoint
from offspec.checkpoint.checksum import FileSum, damage, sum_of
from offspec.checkpoint.folder import CONFIG, INDEX, TEXT_FILES
from offspec.checkpoint.pack_manifest import (
    MANIFEST,
    METHOD,
    Manifest,
    Origin,
    PackedFile,
    quoted,
    read_manifest,
)
from offspec.checkpoint.safetensors import read_header
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice
from offspec.core.files import disk_full, reading, sync_folder, write_file
from offspec.core.progress import ByteProgress
from offspec.model.quantize.pack.contents import FileContents

_MOST_TEXT = 256 * 2**20


class Unfinished:
    """Takes up what an earlier run has finished of the same pack; `files` are those, by name.

    Of another pack nothing is kept. A file whose checksum is wrong is not kept either.
    """

    def __init__(
        self, folder: Path, origin: Origin, contents: Sequence[FileContents], notify: Callable[[Event], None]
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
            self._keep(found, notify)

    def _keep(self, found: dict[str, PackedFile], notify: Callable[[Event], None]) -> None:
        total = sum(file.sum.size for file in found.values())
        progress = ByteProgress("checking what is finished", total, notify)
        for name, file in found.items():
            if damage(self.folder / name, file.sum, add=progress.add) is None:
                self.files[name] = file

    def _before(self, notify: Callable[[Event], None]) -> dict[str, PackedFile]:
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
            write(file.name, _content(file))
        write(INDEX, _json(self._index()))
        config = _json(self._config(source.config))
        manifest = Manifest(self.origin, self.files, {**texts, CONFIG: sum_of(config)})
        write_file(self.folder / MANIFEST, manifest.to_text().encode())
        write_file(self.folder / CONFIG, config)
        sync_folder(self.folder)
        os.rename(self.folder, folder)
        return manifest

    def _index(self) -> dict[str, Any]:
        names = {name: list(read_header(self.folder / name)[0]) for name in self.files}
        return {
            "metadata": {"total_size": sum(file.sum.size for file in self.files.values())},
            "weight_map": {tensor: name for name, tensors in names.items() for tensor in tensors},
        }

    def _config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The model's configuration, which says that these weights are not ordinary ones."""
        kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
        method = {"quant_method": METHOD, "format": self.origin.format}
        return {**kept, "dtype": "bfloat16", "quantization_config": method}

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


def _content(file: Path) -> bytes:
    with reading(file):
        return file.read_bytes()


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()

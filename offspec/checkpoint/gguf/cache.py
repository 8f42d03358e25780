"""What a GGUF file leaves in the cache: a folder that belongs to its header, size and time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.text import builds_tokenizers, sampling_defaults, write_text_files
from offspec.core.cache_dir import cache_root, folder_of, make_folder, remove_folder
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice
from offspec.core.files import write_file

TEXT_BYTES = 64 * 2**20  # room for the tokenizer's files, headers, rounding to blocks


class CachedFolder:
    """The folder of a file in one room of the cache ("unpacked", "described"), made where it is missing.

    version: of the code that fills it, raised when the same file would be filled otherwise.
    """

    def __init__(self, header: GgufHeader, room: str, version: int, cache_dir: Path | None) -> None:
        self._header, self._version = header, version
        self._name = header.path.name
        self._key = _key(header, version)
        self.path = folder_of(cache_root(cache_dir) / room, header.path.stem, self._key)

    def open(
        self,
        read: Callable[[Path], Checkpoint],
        fill: Callable[[Path], None],
        notify: Callable[[Event], None],
    ) -> Checkpoint:
        """The checkpoint that `read` finds in the folder, which `fill` makes, whole or not at all."""
        if self.path.exists():
            try:
                return read(self.path)
            except CheckpointError:  # another process has changed it
                notify(Notice(f"{self.path} was damaged and is made again"))
                remove_folder(self.path)

        def waiting() -> None:
            notify(Notice(f"another process is preparing {self._name}: waiting for it"))

        def fill_whole(folder: Path) -> None:
            fill(folder)
            if _key(self._header, self._version) != self._key:
                raise CheckpointError(f"{self._name} changed while it was read: run the same command again")

        make_folder(self.path, fill_whole, waiting)
        return read(self.path)


def write_description(header: GgufHeader, config: Any, folder: Path, notify: Callable[[Event], None]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    config: the transformers configuration. Raises UnsupportedModelError, DiskFullError.
    """
    text = {**config.to_dict(), "dtype": "bfloat16"}
    text.pop("_name_or_path", None)
    text.pop("_model_name_or_path", None)
    write_file(folder / CONFIG, (json.dumps(text, indent=2, sort_keys=True) + "\n").encode())
    write_text_files(header, folder, notify)


def _key(header: GgufHeader, version: int) -> str:
    stats = [file.stat() for file in header.files]
    seen = repr((version, header.digest, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))
    seen += "" if builds_tokenizers() else " tokenizer by architecture"
    seen += " sampling" if sampling_defaults(header) else ""
    return hashlib.sha256(seen.encode()).hexdigest()[:16]

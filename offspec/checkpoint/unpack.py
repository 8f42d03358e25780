"""A GGUF file unpacked once into a bfloat16 folder of the cache, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from offspec.checkpoint.cache import cache_root, make_folder, remove_folder
from offspec.checkpoint.disk import require_space, write_file
from offspec.checkpoint.folder import CONFIG, INDEX, Checkpoint, open_folder
from offspec.checkpoint.gguf import GgufHeader, read_gguf
from offspec.checkpoint.gguf_values import Recipe, check_types, values
from offspec.checkpoint.write import SafetensorsWriter
from offspec.config import format_bytes
from offspec.errors import CheckpointError
from offspec.events import Event, LoadProgress, Notice

VERSION = 1  # raise it when the same file would be unpacked to other bytes
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_TEXT_BYTES = 64 * 2**20  # tokenizer files, headers, rounding to blocks


def unpack(path: Path, name: str, notify: Callable[[Event], None], cache_dir: Path | None) -> Checkpoint:
    """Open a GGUF file as a checkpoint, unpacking it into the cache if it is not there yet.

    The cached folder belongs to the file's header, size and time. Raises what `open_checkpoint` raises.
    """
    header = read_gguf(path)
    folder = cache_root(cache_dir) / "unpacked" / _key(header)
    if folder.exists():
        try:
            return open_folder(folder, name)
        except CheckpointError:  # someone else has been at it
            notify(Notice(f"{folder} was damaged and is made again"))
            remove_folder(folder)

    def waiting() -> None:
        notify(Notice(f"another process is unpacking {path.name}: waiting for it"))

    make_folder(folder, lambda partial: _fill(header, partial, folder, notify), waiting)
    return open_folder(folder, name)


def _key(header: GgufHeader) -> str:
    stat = header.path.stat()
    seen = repr((VERSION, header.digest, stat.st_size, stat.st_mtime_ns))
    stem = re.sub(r"[^\w.-]", "_", header.path.stem)[:80]
    return f"{stem}-{hashlib.sha256(seen.encode()).hexdigest()[:16]}"


def _fill(header: GgufHeader, partial: Path, folder: Path, notify: Callable[[Event], None]) -> None:
    """Write the whole model folder to `partial`, which is to become `folder`."""
    from offspec.checkpoint.gguf_model import read_config, recipes
    from offspec.checkpoint.gguf_text import write_text_files

    config = read_config(header)
    plan = recipes(header, config)
    check_types(header.path, plan)
    total = sum(recipe.nbytes for recipe in plan)
    require_space(folder.parent, total + _TEXT_BYTES, f"unpacking {header.path.name}")
    notify(Notice(f"unpacking {header.path.name} once to {format_bytes(total)} of bfloat16 in {folder}"))
    text = {**config.to_dict(), "dtype": "bfloat16"}
    text.pop("_name_or_path", None)
    text.pop("_model_name_or_path", None)
    write_file(partial / CONFIG, (json.dumps(text, indent=2, sort_keys=True) + "\n").encode())
    write_text_files(header, partial, notify)
    progress = _Progress(f"unpacking {header.path.name}", total, notify)
    weight_map: dict[str, str] = {}
    for file, group in groupby(sorted(plan, key=_place), key=lambda recipe: _place(recipe)[1]):
        members = list(group)
        _write(header.path, partial / file, members, progress)
        weight_map |= {recipe.name: file for recipe in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(partial / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _place(recipe: Recipe) -> tuple[int, str]:
    """One file for each layer, so that a layer's bytes lie together, and one for the rest."""
    if match := _LAYER.search(recipe.name):
        return int(match[1]), f"model-layer-{int(match[1]):04}.safetensors"
    return -1, "model-rest.safetensors"


def _write(source: Path, file: Path, members: list[Recipe], progress: _Progress) -> None:
    entries = [(recipe.name, "BF16", recipe.shape) for recipe in members]
    with SafetensorsWriter(file, entries, on_write=progress.add) as out:
        for recipe in members:
            for piece in values(source, recipe):
                out.write(recipe.name, piece)


class _Progress:
    """Counts bytes, and sends an event for each hundredth of the whole."""

    def __init__(self, stage: str, total: int, notify: Callable[[Event], None]) -> None:
        self._stage, self._total, self._notify = stage, total, notify
        self._done = 0
        self._sent = -1
        self.add(0)

    def add(self, count: int) -> None:
        self._done += count
        share = 100 * self._done // max(1, self._total)
        if share > self._sent:
            self._sent = share
            self._notify(LoadProgress(self._stage, self._done, self._total, "bytes"))

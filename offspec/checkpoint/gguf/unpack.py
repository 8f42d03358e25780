"""A GGUF file unpacked once into a bfloat16 folder of the cache, whole or not at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

from offspec.checkpoint.folder import INDEX, Checkpoint, open_folder
from offspec.checkpoint.gguf.cache import TEXT_BYTES, CachedFolder, write_description
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.values import GgufRecipe, check_types, values
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.cache_dir import UNPACKED
from offspec.core.events import Event, Notice
from offspec.core.files import require_space, write_file
from offspec.core.progress import ByteProgress
from offspec_planners.units import format_bytes

VERSION = 2  # raise it when the same file would be unpacked to other bytes
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def unpack(
    header: GgufHeader,
    name: str,
    notify: Callable[[Event], None],
    cache_dir: Path | None,
    reason: str = "",
) -> Checkpoint:
    """Open a GGUF file as a checkpoint, unpacking it into the cache if it is not there yet.

    reason: why it is not streamed as it is, for a notice. Raises what `open_checkpoint`
    raises.
    """
    cached = CachedFolder(header, UNPACKED, VERSION, cache_dir)

    def fill(partial: Path) -> None:
        _fill(header, partial, cached.path, notify, reason)

    return cached.open(lambda folder: open_folder(folder, name), fill, notify)


def _fill(
    header: GgufHeader, partial: Path, folder: Path, notify: Callable[[Event], None], reason: str
) -> None:
    """Write the whole model folder to `partial`, which is to become `folder`."""
    from offspec.checkpoint.gguf.model import read_config, recipes

    config = read_config(header)
    plan = recipes(header, config)
    check_types(header.path, plan)
    total = sum(recipe.nbytes for recipe in plan)
    require_space(folder.parent, total + TEXT_BYTES, f"unpacking {header.path.name}")
    why = f", as {reason}" if reason else ""
    notify(Notice(f"unpacking {header.path.name} once to {format_bytes(total)} of bfloat16 in {folder}{why}"))
    write_description(header, config, partial, notify)
    progress = ByteProgress(f"unpacking {header.path.name}", total, notify)
    weight_map: dict[str, str] = {}
    for file, group in groupby(sorted(plan, key=_place), key=lambda recipe: _place(recipe)[1]):
        members = list(group)
        _write(partial / file, members, progress)
        weight_map |= {recipe.name: file for recipe in members}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_file(partial / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _place(recipe: GgufRecipe) -> tuple[int, str]:
    """One file for each layer, so that a layer's bytes lie together, and one for the rest."""
    if match := _LAYER.search(recipe.name):
        return int(match[1]), f"model-layer-{int(match[1]):04}.safetensors"
    return -1, "model-rest.safetensors"


def _write(file: Path, members: list[GgufRecipe], progress: ByteProgress) -> None:
    entries = [(recipe.name, "BF16", recipe.shape) for recipe in members]
    with SafetensorsWriter(file, entries, on_write=progress.add) as out:
        for recipe in members:
            for piece in values(recipe):
                out.write(recipe.name, piece.bfloat16())

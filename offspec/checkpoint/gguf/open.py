"""Opening a GGUF file: streamed in place, or unpacked once into a bfloat16 folder of the cache.

A streamed file keeps its weights. The cache holds only the configuration, the tokenizer, and vectors that the
model needs in another form.
"""

import hashlib
import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint, open_folder, open_or_create, write_index
from offspec.checkpoint.gguf.dequantize import GgufRecipe, check_types, values
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.model import read_config, recipes
from offspec.checkpoint.gguf.split import read_model
from offspec.checkpoint.gguf.streamed_weights import needs_rewrite, unstreamable_reason, weight
from offspec.checkpoint.gguf.tokenizer import builds_tokenizers, sampling_defaults, write_text_files
from offspec.checkpoint.json_file import read_json, write_json
from offspec.checkpoint.ranges import one_line
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.safetensors_writer import SafetensorsWriter
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec.core.cache_dir import UNPACKED, cache_folder, cache_root
from offspec.core.errors import CheckpointError
from offspec.core.events import Event, Notice
from offspec.core.files import require_space
from offspec.core.progress import ByteProgress
from offspec_planners.units import format_bytes

LITTLE = "little.safetensors"
# Folders in the cache, and versions, to be increased if the same file would produce other contents.
_DESCRIBED, _UNPACKED = ("described", 2), (UNPACKED, 2)
_TEXT_BYTES = 64 * 2**20  # for the tokenizer's files, headers, rounding up to blocks
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def open_gguf(
    path: Path, name: str, unpack: bool, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open a GGUF file; unpack it if requested or if it cannot be streamed in place.

    Raises the errors of `open_checkpoint`.
    """
    header = read_model(path)
    reason = "" if unpack else unstreamable_reason(header)
    kept, version = _UNPACKED if unpack or reason else _DESCRIBED
    key = _key(header, version)
    folder, file = cache_folder(cache_root(cache_dir) / kept, header.path.stem, key), header.path.name

    def read(made: Path) -> Checkpoint:
        if kept == UNPACKED:
            return open_folder(made, name)
        return Checkpoint(name, made, read_json(made / CONFIG), MappingProxyType(_weights(header, made)))

    def fill(partial: Path) -> None:
        if kept == UNPACKED:
            _unpack(header, partial, folder, notify, reason)
        else:
            _describe(header, partial, folder, notify)
        if _key(header, version) != key:
            raise CheckpointError(f"{file} changed while it was read: run the same command again")

    return open_or_create(
        folder,
        read,
        fill,
        notify,
        rebuild_hint=f"{folder} was damaged and is rebuilt",
        waiting=f"another process is preparing {file}: waiting for it",
    )


def _key(header: GgufHeader, version: int) -> str:
    stats = [file.stat() for file in header.files]
    seen = repr((version, header.digest, [(stat.st_size, stat.st_mtime_ns) for stat in stats]))
    seen += "" if builds_tokenizers() else " tokenizer by architecture"
    seen += " sampling" if sampling_defaults(header) else ""
    return hashlib.sha256(seen.encode()).hexdigest()[:16]


def _describe(header: GgufHeader, partial: Path, folder: Path, notify: Callable[[Event], None]) -> None:
    """Write the cache folder of a streamed file to `partial`, which is later renamed to `folder`."""
    require_space(folder.parent, _TEXT_BYTES, f"the tokenizer of {header.path.name}")
    config = read_config(header)
    plan = recipes(header, config)
    for recipe in plan:  # any refusal is raised before anything is written
        if not needs_rewrite(recipe):
            weight(recipe)
    _write_texts(header, config, partial, notify)
    if rewritten := [recipe for recipe in plan if needs_rewrite(recipe)]:
        _write(partial / LITTLE, "F32", rewritten)


def _weights(header: GgufHeader, folder: Path) -> dict[str, Weight]:
    """Return the location of each weight of a streamed file: in the file itself, or in its cache folder."""
    plan = recipes(header, _config(folder))
    rewritten: dict[str, TensorInfo] = {}
    if any(needs_rewrite(recipe) for recipe in plan):
        rewritten, _ = read_header(folder / LITTLE)
    found: dict[str, Weight] = {}
    for recipe in plan:
        if not needs_rewrite(recipe):
            found[recipe.name] = weight(recipe)
        elif recipe.name in rewritten and rewritten[recipe.name].shape == recipe.shape:
            found[recipe.name] = rewritten[recipe.name]
        else:
            raise CheckpointError(f"{folder / LITTLE} cannot be used: remove it")
    return found


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises many types for an edited file
        raise CheckpointError(f"{folder / CONFIG} cannot be used ({one_line(error)}): remove it") from error


def _unpack(
    header: GgufHeader, partial: Path, folder: Path, notify: Callable[[Event], None], reason: str
) -> None:
    """Write the whole model folder to `partial`, which is later renamed to `folder`."""
    config = read_config(header)
    plan = recipes(header, config)
    check_types(header.path, plan)
    total = sum(recipe.nbytes for recipe in plan)
    require_space(folder.parent, total + _TEXT_BYTES, f"unpacking {header.path.name}")
    why = f", as {reason}" if reason else ""
    notify(Notice(f"unpacking {header.path.name} once to {format_bytes(total)} of bfloat16 in {folder}{why}"))
    _write_texts(header, config, partial, notify)
    progress = ByteProgress(f"unpacking {header.path.name}", total, notify)
    weight_map: dict[str, str] = {}
    for file, group in groupby(sorted(plan, key=_place), key=lambda recipe: _place(recipe)[1]):
        members = list(group)
        _write(partial / file, "BF16", members, progress.add)
        weight_map |= {recipe.name: file for recipe in members}
    write_index(partial, weight_map, total)


def _place(recipe: GgufRecipe) -> tuple[int, str]:
    """Return a recipe's file: one file per layer, so that a layer is contiguous, and one for the rest."""
    if match := _LAYER.search(recipe.name):
        return int(match[1]), f"model-layer-{int(match[1]):04}.safetensors"
    return -1, "model-rest.safetensors"


def _write_texts(header: GgufHeader, config: Any, folder: Path, notify: Callable[[Event], None]) -> None:
    """Write config.json, generation_config.json and the tokenizer's files.

    config: the transformers configuration. Raises UnsupportedModelError, DiskFullError.
    """
    text = {**config.to_dict(), "dtype": "bfloat16"}
    text.pop("_name_or_path", None)
    text.pop("_model_name_or_path", None)
    write_json(folder / CONFIG, text, sort_keys=True)
    write_text_files(header, folder, notify)


def _write(
    file: Path, dtype: str, plan: list[GgufRecipe], on_write: Callable[[int], None] | None = None
) -> None:
    entries = [(recipe.name, dtype, recipe.shape) for recipe in plan]
    with SafetensorsWriter(file, entries, on_write=on_write) as out:
        for recipe in plan:
            for piece in values(recipe):
                out.write(recipe.name, piece.bfloat16() if dtype == "BF16" else piece)

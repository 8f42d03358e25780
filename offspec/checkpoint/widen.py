"""A widened model as a folder: the function of a small model at k² times the bytes (see `widening`).

One safetensors file for each layer (data at a multiple of 4096 bytes, blocks reserved before they are
written, so that a layer is one extent if the disk has room for one) and one for the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, INDEX, Checkpoint
from offspec.checkpoint.widening import WideTensor, dense, total_bytes, wide_config, wide_files
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.files import new_folder, require_space, write_file

RECIPE = "widened.json"  # in the folder: its source, and where the bytes of a pass lie
SMALL_FILES = 64 << 20  # bytes of room for headers, the tokenizer and rounding to blocks
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)


def widen(
    checkpoint: Checkpoint, out: Path, factor: int, *, on_write: Callable[[int], None] | None = None
) -> None:
    """Write the wide model into a new folder, which appears when it is whole.

    Needs a few pieces of 8 MB in memory.

    Args:
        checkpoint: The small model, not quantized.
        out: The folder, which must not exist.
        factor: A power of two.
        on_write: Takes the bytes of every piece written.

    Raises:
        DiskFullError: There is no room.
        UnsupportedModelError: The model cannot be widened.
        RequestError: The folder exists, or the factor is not a power of two.
    """
    files = wide_files(checkpoint, factor)
    if out.exists():
        raise RequestError(f"{out} exists already: remove it, or name another folder")
    require_space(out, total_bytes(files) + SMALL_FILES, f"the model widened ×{factor}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        write_wide(checkpoint, partial, files, factor, on_write)


def write_wide(
    checkpoint: Checkpoint,
    folder: Path,
    files: dict[str, list[WideTensor]],
    factor: int,
    on_write: Callable[[int], None] | None = None,
) -> None:
    """Write every file of the wide model into an empty folder. Raises DiskFullError."""
    for file, tensors in files.items():
        write_tensors(folder / file, tensors, on_write)
    write_rest(checkpoint, folder, files, factor)


def write_tensors(
    file: Path, tensors: list[WideTensor], on_write: Callable[[int], None] | None = None
) -> None:
    """Write one file of weights."""
    entries = [(tensor.name, tensor.source.dtype, tensor.shape) for tensor in tensors]
    with SafetensorsWriter(file, entries, on_write=on_write) as writer:
        for tensor in tensors:
            for piece in tensor.pieces():
                writer.write(tensor.name, piece)


def write_rest(checkpoint: Checkpoint, folder: Path, files: dict[str, list[WideTensor]], factor: int) -> None:
    """Write the index, the config, the recipe, and copies of the tokenizer's files."""
    # From the file itself: defaults may have completed the checkpoint's own copy.
    config = json.loads((checkpoint.folder / CONFIG).read_text("utf-8"))
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    write_index(folder, weight_map, total_bytes(files))
    write_json(folder / CONFIG, wide_config(config, factor))
    write_json(folder / RECIPE, recipe(checkpoint, files, factor))
    copy_tokenizer(checkpoint, folder)


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    """Write the index of several weight files. weight_map: file by tensor; total: bytes of all tensors."""
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template, and the generation settings."""
    for pattern in _COPIED:
        for file in sorted(checkpoint.folder.glob(pattern)):
            if file.is_file():
                write_file(folder / file.name, file.read_bytes())


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON."""
    write_file(file, json.dumps(content, indent=2).encode() + b"\n")


def recipe(checkpoint: Checkpoint, files: dict[str, list[WideTensor]], factor: int) -> dict[str, Any]:
    """Source and sizes of the wide model, for benches, and to tell whether it still belongs to its source."""
    layers = [name for name in files if name.startswith("model-layer-")]
    in_layers = [tensor for name in layers for tensor in files[name]]
    head = next(tensor for tensors in files.values() for tensor in tensors if tensor.name == "lm_head.weight")
    return {
        "source": checkpoint.folder.name,
        "fingerprint": fingerprint(checkpoint),
        "factor": factor,
        "layer_files": layers,
        "layer_bytes": sum(tensor.nbytes for tensor in in_layers),
        "head_bytes": head.nbytes,
        "total_bytes": total_bytes(files),
        # Weights that a token is multiplied with: two FLOPs each.
        "matmul_parameters": sum(
            tensor.shape[0] * tensor.shape[1] for tensor in [*in_layers, head] if len(tensor.shape) == 2
        ),
    }


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe in a widened folder. Raises CheckpointError if there is none."""
    try:
        found = json.loads((folder / RECIPE).read_text("utf-8"))
        return {**found, "factor": int(found["factor"]), "fingerprint": str(found["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is not a widened model: name another folder") from error


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of each tensor's name, type, shape and first 4 kB: enough to tell one model from another."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dense(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(4096, tensor.nbytes)))
    return digest.hexdigest()[:16]

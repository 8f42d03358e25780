"""A widened model as a folder: the output of a small model at k² times the bytes (see `wide_tensors`).

`demo-wide` is the demo model widened ×4, large enough to be streamed, and written to the cache on first use.

Each layer is one safetensors file, and so is the rest. Data starts at a multiple of 4096 bytes, and blocks
are reserved before writing, so a layer is one extent if the disk has room for one.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint, open_folder, open_or_create, write_index
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.safetensors_writer import SafetensorsWriter
from offspec.checkpoint.wide_tensors import WideTensor, dense_tensors, total_bytes, wide_config, wide_files
from offspec.core.cache_dir import WIDENED, cache_root
from offspec.core.events import Event, Notice, ignore_event
from offspec.core.files import require_space, write_atomic
from offspec.core.progress import ByteProgress
from offspec_planners.units import format_bytes

FACTOR = 4  # widening of the demo model
RECIPE = "widened.json"  # records the source, and the location of the bytes that a pass reads
SMALL_FILES = 64 << 20  # bytes reserved for headers, the tokenizer and rounding up to blocks
_COPIED = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
)

OpenSmall = Callable[[Path, Callable[[Event], None]], Checkpoint]


def widened_folder(name: str, factor: int, cache_dir: Path | None = None) -> Path:
    """Return the default folder of a widened model, in the user's cache."""
    return cache_root(cache_dir) / WIDENED / f"{name}-x{factor}"


def demo_wide_folder(cache_dir: Path | None = None) -> Path:
    """Return the folder of the wide demo model, which need not exist."""
    return widened_folder("demo", FACTOR, cache_dir)


def open_demo_wide(
    name: str, open_small: OpenSmall, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open the wide demo model, after writing it if it is missing or damaged.

    Args:
        name: Name of the model.
        open_small: Unpacks the small model into a given folder and reports its progress.
        notify: Receives Notice and LoadProgress events while the model is written.
        cache_dir: Cache folder, as in `open_checkpoint`.

    Raises:
        DiskFullError: The disk is full.
        CheckpointError: The folder cannot be written, or the small model is not installed.
    """
    folder = demo_wide_folder(cache_dir)
    return open_or_create(
        folder,
        lambda made: open_folder(made, name),
        lambda partial: _fill(partial, folder, name, open_small, notify),
        notify,
        rebuild_hint=f"{folder} was damaged and is written again",
        waiting=f"another process is writing {name}: waiting for it",
    )


def _fill(
    partial: Path, folder: Path, name: str, open_small: OpenSmall, notify: Callable[[Event], None]
) -> None:
    """Write the model to `partial`, which is later renamed to `folder`."""
    scratch = partial / ".small"  # next to its copy, so that both are removed together
    small = open_small(scratch, ignore_event)
    files = wide_files(small, FACTOR)
    total = total_bytes(files)
    require_space(folder.parent, total + SMALL_FILES, name)
    notify(
        Notice(
            f"writing {name} once: the demo model widened ×{FACTOR}, {total / 2e9:.1f} B parameters, "
            f"{format_bytes(total)} in {folder}; `offspec models rm {name}` removes it"
        )
    )
    progress = ByteProgress("writing demo-wide", total, notify)
    write_wide(small, partial, files, FACTOR, progress.add)
    shutil.rmtree(scratch)


def write_wide(
    checkpoint: Checkpoint,
    folder: Path,
    files: dict[str, list[WideTensor]],
    factor: int,
    on_write: Callable[[int], None] | None = None,
) -> None:
    """Write every file of the wide model into an empty folder. Raises DiskFullError."""
    for file, tensors in files.items():
        entries = [(tensor.name, tensor.source.dtype, tensor.shape) for tensor in tensors]
        with SafetensorsWriter(folder / file, entries, on_write=on_write) as writer:
            for tensor in tensors:
                for piece in tensor.pieces():
                    writer.write(tensor.name, piece)
    write_metadata(checkpoint, folder, files, factor)


def write_metadata(
    checkpoint: Checkpoint, folder: Path, files: dict[str, list[WideTensor]], factor: int
) -> None:
    """Write the index, the config, the recipe, and copies of the tokenizer's files."""
    # From the file itself: defaults may have completed the checkpoint's own copy.
    config = json.loads((checkpoint.folder / CONFIG).read_text("utf-8"))
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    write_index(folder, weight_map, total_bytes(files))
    write_json(folder / CONFIG, wide_config(config, factor))
    write_json(folder / RECIPE, recipe(checkpoint, files, factor))
    copy_tokenizer(checkpoint, folder)


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Copy the tokenizer's files, the chat template, and the generation settings."""
    for pattern in _COPIED:
        for file in sorted(checkpoint.folder.glob(pattern)):
            if file.is_file():
                write_atomic(folder / file.name, file.read_bytes())


def recipe(checkpoint: Checkpoint, files: dict[str, list[WideTensor]], factor: int) -> dict[str, Any]:
    """Return source and sizes of the wide model, for benchmarks and to check that it matches its source."""
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
        # Weights that each token is multiplied with: two FLOPs each.
        "matmul_parameters": sum(
            tensor.shape[0] * tensor.shape[1] for tensor in [*in_layers, head] if len(tensor.shape) == 2
        ),
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return a hash of each tensor's name, dtype, shape and first 4 kB, which identifies the model."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dense_tensors(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(4096, tensor.nbytes)))
    return digest.hexdigest()[:16]

"""A widened model as a folder: the function of a small model at k² times the bytes (see `widening`).

`demo-wide` is the demo model widened ×4, large enough to be streamed, written to the cache on first use.

One safetensors file for each layer (data at a multiple of 4096 bytes, blocks reserved before they are
written, so that a layer is one extent if the disk has room for one) and one for the rest.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offspec.checkpoint.folder import CONFIG, Checkpoint, open_folder, open_or_make, write_index
from offspec.checkpoint.json_file import write_json
from offspec.checkpoint.widening import WideTensor, dense, total_bytes, wide_config, wide_files
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.cache_dir import WIDENED, cache_root
from offspec.core.events import Event, Notice, unheard
from offspec.core.files import require_space, write_file
from offspec.core.progress import ByteProgress
from offspec_planners.units import format_bytes

FACTOR = 4  # of the demo model
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

OpenSmall = Callable[[Path, Callable[[Event], None]], Checkpoint]


def widened_folder(name: str, factor: int, cache_dir: Path | None = None) -> Path:
    """The folder of a widened model unless one is named: in the user's cache."""
    return cache_root(cache_dir) / WIDENED / f"{name}-x{factor}"


def demo_wide_folder(cache_dir: Path | None = None) -> Path:
    """The folder of the wide demo model, written or not."""
    return widened_folder("demo", FACTOR, cache_dir)


def open_demo_wide(
    name: str, open_small: OpenSmall, notify: Callable[[Event], None], cache_dir: Path | None
) -> Checkpoint:
    """Open the wide demo model, after writing it if it is missing or damaged.

    Args:
        name: What the model is called.
        open_small: Unpacks the small model into the folder that it is given, telling its progress.
        notify: Takes Notice and LoadProgress events while it is written.
        cache_dir: As `open_checkpoint` has it.

    Raises:
        DiskFullError: There is no room for it.
        CheckpointError: Nothing can be written there, or the small model is not installed.
    """
    folder = demo_wide_folder(cache_dir)
    return open_or_make(
        folder,
        lambda made: open_folder(made, name),
        lambda partial: _fill(partial, folder, name, open_small, notify),
        notify,
        again=f"{folder} was damaged and is written again",
        waiting=f"another process is writing {name}: waiting for it",
    )


def _fill(
    partial: Path, folder: Path, name: str, open_small: OpenSmall, notify: Callable[[Event], None]
) -> None:
    """Write the model to `partial`, which is to become `folder`."""
    scratch = partial / ".small"  # next to its copy, so that both are removed together
    small = open_small(scratch, unheard)
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
    write_rest(checkpoint, folder, files, factor)


def write_rest(checkpoint: Checkpoint, folder: Path, files: dict[str, list[WideTensor]], factor: int) -> None:
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
                write_file(folder / file.name, file.read_bytes())


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


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of each tensor's name, type, shape and first 4 kB: enough to tell one model from another."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dense(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(4096, tensor.nbytes)))
    return digest.hexdigest()[:16]

"""Build a widened model: the function of a small one at k² times the bytes (see `bench/widening.py`).

    python -m bench.lib.widen MODEL [OUT] --factor 4

MODEL is a folder, a hub id, a .gguf file, or `demo`. The folder OUT appears when it is whole, with one
safetensors file for each layer (data at a multiple of 4096 bytes, blocks reserved before they are
written, so that a layer is one extent where the disk has room for one) and one for the rest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.widening import WideTensor, dense, plan, wide_config
from offspec.checkpoint.write import SafetensorsWriter
from offspec.core.cache_dir import cache_root
from offspec.core.files import new_folder, require_space, write_file

if TYPE_CHECKING:
    from offspec.checkpoint import Checkpoint

RECIPE = "widened.json"  # in the folder: what it was made from, and where the bytes of a pass lie
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
    """Write the wide model into the folder `out`, which must not exist; it appears there when whole.

    Needs a few pieces of 8 MB in memory. `on_write` is called with the bytes of every piece written.
    Raises DiskFullError, UnsupportedModelError.
    """
    files = plan(checkpoint, factor)
    if out.exists():
        raise BenchError(f"{out} exists already: remove it, or name another folder")
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    require_space(out, total + (64 << 20), f"the model widened ×{factor}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as partial:
        for file, tensors in files.items():
            _write_file(partial / file, tensors, on_write)
        _write_rest(checkpoint, partial, files, factor)


def _write_file(file: Path, tensors: list[WideTensor], on_write: Callable[[int], None] | None) -> None:
    entries = [(tensor.name, tensor.source.dtype, tensor.shape) for tensor in tensors]
    with SafetensorsWriter(file, entries, on_write=on_write) as writer:
        for tensor in tensors:
            for piece in tensor.pieces():
                writer.write(tensor.name, piece)


def _write_rest(
    checkpoint: Checkpoint, folder: Path, files: dict[str, list[WideTensor]], factor: int
) -> None:
    """The index, the config, the recipe, and copies of the tokenizer's files."""
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    # From the file itself: what a checkpoint keeps of it may have been completed by defaults.
    config = json.loads((checkpoint.folder / "config.json").read_text("utf-8"))
    write_index(folder, {tensor.name: file for file, tensors in files.items() for tensor in tensors}, total)
    write_json(folder / "config.json", wide_config(config, factor))
    write_json(folder / RECIPE, recipe(checkpoint, files, factor))
    copy_tokenizer(checkpoint, folder)


def write_index(folder: Path, weight_map: dict[str, str], total: int) -> None:
    """The index of a checkpoint of several files. weight_map: file by tensor; total: bytes of all tensors."""
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """The tokenizer's files, the chat template, and the settings of generation."""
    for pattern in _COPIED:
        for file in sorted(checkpoint.folder.glob(pattern)):
            if file.is_file():
                write_file(folder / file.name, file.read_bytes())


def write_json(file: Path, content: dict[str, Any]) -> None:
    write_file(file, json.dumps(content, indent=2).encode() + b"\n")


def recipe(checkpoint: Checkpoint, files: dict[str, list[WideTensor]], factor: int) -> dict[str, Any]:
    """What a bench needs to know of the wide model, and whether it still belongs to its source."""
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
        "total_bytes": sum(tensor.nbytes for tensors in files.values() for tensor in tensors),
        # Weights that a token is multiplied with: two FLOPs each.
        "matmul_parameters": sum(
            tensor.shape[0] * tensor.shape[1] for tensor in [*in_layers, head] if len(tensor.shape) == 2
        ),
    }


def fingerprint(checkpoint: Checkpoint) -> str:
    """A hash of every tensor's name, type, shape and first 4 kB: enough to tell one model from another."""
    digest = hashlib.sha256()
    for name, tensor in sorted(dense(checkpoint).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            digest.update(file.read(min(4096, tensor.nbytes)))
    return digest.hexdigest()[:16]


def default_folder(model: str, factor: int) -> Path:
    """Where a widened model is kept when no folder is named: in the user's cache."""
    return cache_root() / "widened" / f"{short_name(model)}-x{factor}"


def short_name(model: str) -> str:
    """What a model is called in names of folders that are made of it."""
    return Path(model).stem if model.endswith(".gguf") else Path(model).name


def ensure(model: str, out: Path | None, factor: int, *, force: bool = False) -> tuple[Path, bool]:
    """The folder of the wide model, and whether it had to be built. One that is there is used again.

    Raises BenchError when the folder holds another model or another factor; `force` replaces it.
    """
    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model, unpack=True)
    out = out or default_folder(model, factor)
    if out.exists() and not (force and (out / RECIPE).exists()):
        found = read_recipe(out)
        if (found["factor"], found["fingerprint"]) != (factor, fingerprint(checkpoint)):
            raise BenchError(f"{out} was widened from another model or by another factor: pass --force")
        return out, False
    files = plan(checkpoint, factor)  # refuses before anything is removed
    if out.exists():
        shutil.rmtree(out)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    with progress_line(f"widening {checkpoint.folder.name} ×{factor}", total) as on_write:
        widen(checkpoint, out, factor, on_write=on_write)
    return out, True


@contextmanager
def progress_line(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr; what is entered takes the bytes of every piece that was written."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.advance(task, count)


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe in a widened folder. Raises BenchError when it is no such folder."""
    try:
        found = json.loads((folder / RECIPE).read_text("utf-8"))
        return {**found, "factor": int(found["factor"]), "fingerprint": str(found["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{folder} was not made by bench.lib.widen: name another folder") from error


def main(argv: list[str] | None = None) -> int:
    """Build the model and print its folder on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.widen", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    parser.add_argument("out", nargs="?", type=Path, help="the folder to make (default: in the user's cache)")
    parser.add_argument("--factor", type=int, default=4, help="a power of two; 1 unpacks it (default 4)")
    parser.add_argument("--force", action="store_true", help="replace a widened model that is there")
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model, args.out, args.factor, force=args.force)[0])


if __name__ == "__main__":
    sys.exit(main())

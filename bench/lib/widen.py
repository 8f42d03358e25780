"""Building a widened model: a small one at k² times the bytes (see `offspec.checkpoint.wide_tensors`).

    python -m bench.lib.widen MODEL [OUT] --factor 4

MODEL is a folder, a hub id, a .gguf file, or `demo`. The folder OUT is created atomically.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from offspec.checkpoint import Checkpoint
from offspec.checkpoint.wide_model import RECIPE, SMALL_FILES, fingerprint, widened_folder, write_wide
from offspec.checkpoint.wide_tensors import total_bytes, wide_files
from offspec.core.errors import CheckpointError, RequestError
from offspec.core.files import atomic_folder, require_space


def default_folder(model: str, factor: int) -> Path:
    """Return the default folder of a widened model; that of `demo` by 4 is `demo-wide`."""
    return widened_folder(Path(model).stem if model.endswith(".gguf") else Path(model).name, factor)


def ensure(model: str, out: Path | None, factor: int, *, force: bool = False) -> Path:
    """Return the folder of the wide model, building it if necessary.

    Raises BenchError if the folder holds another model or another factor; `force` replaces it.
    """
    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model, unpack=True)
    out = out or default_folder(model, factor)
    if out.exists() and not (force and (out / RECIPE).exists()):
        found = read_recipe(out)
        if (found["factor"], found["fingerprint"]) != (factor, fingerprint(checkpoint)):
            raise BenchError(f"{out} was widened from another model or by another factor: pass --force")
        return out
    files = wide_files(checkpoint, factor)  # raises before anything is removed
    if out.exists():
        shutil.rmtree(out)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"widening {checkpoint.folder.name} ×{factor}", total=total_bytes(files))
        widen(checkpoint, out, factor, on_write=lambda count: progress.advance(task, count))
    return out


def widen(
    checkpoint: Checkpoint, out: Path, factor: int, *, on_write: Callable[[int], None] | None = None
) -> None:
    """Write the wide model into a new folder, atomically.

    Uses memory for a few pieces of 8 MB.

    Args:
        checkpoint: The small model, not quantized.
        out: The folder, which must not exist.
        factor: A power of two.
        on_write: Receives the number of bytes of every piece written.

    Raises:
        DiskFullError: The disk is full.
        UnsupportedModelError: The model cannot be widened.
        RequestError: The folder exists, or the factor is not a power of two.
    """
    files = wide_files(checkpoint, factor)
    if out.exists():
        raise RequestError(f"{out} exists already: remove it, or name another folder")
    require_space(out, total_bytes(files) + SMALL_FILES, f"the model widened ×{factor}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(out) as partial:
        write_wide(checkpoint, partial, files, factor, on_write)


def read_recipe(folder: Path) -> dict[str, Any]:
    """Read the recipe in a widened folder. Raises CheckpointError if there is none."""
    try:
        found = json.loads((folder / RECIPE).read_text("utf-8"))
        return {**found, "factor": int(found["factor"]), "fingerprint": str(found["fingerprint"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder} is not a widened model: name another folder") from error


def main(argv: list[str] | None = None) -> int:
    """Build the model and print its folder on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.widen", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    parser.add_argument("out", nargs="?", type=Path, help="folder to create (default: in the user's cache)")
    parser.add_argument("--factor", type=int, default=4, help="a power of two; 1 unpacks it (default 4)")
    parser.add_argument("--force", action="store_true", help="replace an existing widened model")
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model, args.out, args.factor, force=args.force))


if __name__ == "__main__":
    sys.exit(main())

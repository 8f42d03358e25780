"""Build a widened model: a small one at k² times the bytes (see `offspec.checkpoint.widening`).

    python -m bench.lib.widen MODEL [OUT] --factor 4

MODEL is a folder, a hub id, a .gguf file, or `demo`. The folder OUT appears when it is whole.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from offspec.checkpoint.demo_wide import widened_folder
from offspec.checkpoint.widen import RECIPE, fingerprint, read_recipe, widen
from offspec.checkpoint.widening import total_bytes, wide_files


def default_folder(model: str, factor: int) -> Path:
    """Where a widened model is kept unless a folder is named; that of `demo` by 4 is `demo-wide`."""
    return widened_folder(Path(model).stem if model.endswith(".gguf") else Path(model).name, factor)


def ensure(model: str, out: Path | None, factor: int, *, force: bool = False) -> Path:
    """The folder of the wide model, built if need be.

    Raises BenchError when the folder holds another model or another factor; `force` replaces it.
    """
    from offspec.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model, unpack=True)
    out = out or default_folder(model, factor)
    if out.exists() and not (force and (out / RECIPE).exists()):
        found = read_recipe(out)
        if (found["factor"], found["fingerprint"]) != (factor, fingerprint(checkpoint)):
            raise BenchError(f"{out} was widened from another model or by another factor: pass --force")
        return out
    files = wide_files(checkpoint, factor)  # refuses before anything is removed
    if out.exists():
        shutil.rmtree(out)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(f"widening {checkpoint.folder.name} ×{factor}", total=total_bytes(files))
        widen(checkpoint, out, factor, on_write=lambda count: progress.advance(task, count))
    return out


def main(argv: list[str] | None = None) -> int:
    """Build the model and print its folder on stdout."""
    parser = argparse.ArgumentParser(prog="python -m bench.lib.widen", description=main.__doc__)
    parser.add_argument("model", help="a folder, a hub id, a .gguf file, or demo")
    parser.add_argument("out", nargs="?", type=Path, help="the folder to make (default: in the user's cache)")
    parser.add_argument("--factor", type=int, default=4, help="a power of two; 1 unpacks it (default 4)")
    parser.add_argument("--force", action="store_true", help="replace a widened model that is there")
    args = parser.parse_args(argv)
    return printed(lambda: ensure(args.model, args.out, args.factor, force=args.force))


if __name__ == "__main__":
    sys.exit(main())

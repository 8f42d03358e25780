"""Separate environment of the peers, kept in the user's cache (`OFFSPEC_CACHE`), created on the first run."""

from __future__ import annotations

import hashlib
import os
import sys
import venv
from pathlib import Path

from bench.lib.process import cached_folder, pip
from offspec.core.cache_dir import cache_root

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
WORKER = Path(__file__).with_name("worker.py")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"


def pinned() -> dict[str, str]:
    """Return versions by package, as pinned in the requirements file."""
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def ensure() -> Path:
    """Return the environment's interpreter. Raises BenchError if a package is unavailable, DiskFullError."""
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = cache_root() / "peers" / f"python{sys.version_info.major}.{sys.version_info.minor}-{key}"
    doing = "creating the peers' environment, about 1.3 GB; this takes a minute or more"
    return cached_folder(folder, doing, _install) / "bin" / "python"


def _install(folder: Path) -> None:
    """Create a venv with only the pinned packages. It is renamed afterwards, which is safe: the interpreter
    locates itself by its path, and no script of the venv is used."""
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    # As in the Makefile: the index of torch's CPU build is used for torch only.
    index = ("--extra-index-url", os.environ.get("TORCH_INDEX", _TORCH_INDEX))
    for wanted in ((*index, f"torch=={pinned()['torch']}"), ("--requirement", str(REQUIREMENTS))):
        pip(
            "install", "--retries", "1", *wanted,
            python=str(folder / "bin" / "python"),
            failure="the peers' environment cannot be created",
        )  # fmt: skip

"""What the peers need on disk: an environment of their own, and AirLLM's copy of the target.

Both are kept in the user's cache (`OFFSPEC_CACHE`) and are made on the first run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import say
from offspec.checkpoint.widen import RECIPE
from offspec.core.cache_dir import cache_root, make_folder, remove_folder

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
WORKER = Path(__file__).with_name("worker.py")
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_INDEX = "model.safetensors.index.json"


def pinned() -> dict[str, str]:
    """Versions by package, as the requirements file pins them."""
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    return dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))


def ensure() -> Path:
    """The interpreter of the peers' environment, which is made on the first run (about 1.3 GB).

    Raises BenchError when a package cannot be had, DiskFullError.
    """
    key = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = cache_root() / "peers" / f"python{sys.version_info.major}.{sys.version_info.minor}-{key}"
    if not folder.exists():
        make_folder(folder, _install, lambda: say("another process makes the peers' environment"))
    return folder / "bin" / "python"


def _install(folder: Path) -> None:
    """Make a venv in `folder` and fill it, nothing but what is pinned. It is renamed afterwards: the
    interpreter finds itself by where it lies, and no script of the venv is used."""
    say("making the peers' environment, about 1.3 GB; this takes a minute or more")
    venv.EnvBuilder(with_pip=True, symlinks=True).create(folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pip += ["--no-deps", "--retries", "1"]
    index = os.environ.get("TORCH_INDEX", _TORCH_INDEX)
    # As in the Makefile: the index of torch's CPU build is asked for torch alone.
    _run([*pip, "--extra-index-url", index, f"torch=={pinned()['torch']}"])
    _run([*pip, "--requirement", str(REQUIREMENTS)])


def _run(argv: list[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        raise BenchError(
            f"the peers' environment cannot be made: {(errors or ['pip failed'])[-1].removeprefix('ERROR: ')}"
        )


def airllm_folders(python: Path, target: Path, recipe: Mapping[str, Any]) -> dict[str, str]:
    """AirLLM's view of a widened model: {"target", "shards"}; made on the first run, outside any limit.

    AirLLM reads the number of a shard out of its file name, so it is given the same files under the names
    that the hub's models have, as links. It then writes shards of its own, for the most part links again.
    Raises BenchError with AirLLM's own words when it cannot.
    """
    folder = cache_root() / "peers" / f"airllm-{target.name}-{recipe['fingerprint']}"
    place = {"target": str(folder / "checkpoint"), "shards": str(folder / "shards")}
    if (folder / "whole").exists():
        return place
    remove_folder(folder)
    (folder / "shards").mkdir(parents=True)
    link_shards(target, folder / "checkpoint")
    job = json.dumps({"peer": "airllm", "split_only": True, **place})
    done = subprocess.run([str(python), "-I", str(WORKER), job], stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout and not done.returncode else {}
    if "split_seconds" not in found:
        error = found.get("error", {"kind": "exit code", "message": str(done.returncode)})
        raise BenchError(f"AirLLM cannot split the target: {error['kind']}: {error['message']}")
    (folder / "whole").touch()
    return place


def link_shards(target: Path, folder: Path) -> None:
    """A folder with the weights of `target` as links named model-00001-of-0000N, and its other files."""
    folder.mkdir(parents=True)
    index = json.loads((target / _INDEX).read_text("utf-8"))
    files = sorted(set(index["weight_map"].values()))
    names = {file: f"model-{i:05d}-of-{len(files):05d}.safetensors" for i, file in enumerate(files, 1)}
    for file, name in names.items():
        (folder / name).symlink_to((target / file).resolve())
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (folder / _INDEX).write_text(json.dumps(index), "utf-8")
    for file in sorted(target.iterdir()):
        if file.is_file() and file.suffix != ".safetensors" and file.name not in (_INDEX, RECIPE):
            (folder / file.name).write_bytes(file.read_bytes())

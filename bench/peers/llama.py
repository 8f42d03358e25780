"""llama.cpp as a contender: its commands, and its figures, read from its log.

Its programs report seconds and tokens of the prompt and of the answer, without loading and without the
warm-up run. Bytes read are those of the whole process, loading included.
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
from bench.lib.process import run_measured

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
# Output goes to files, because an answer may end in the middle of a character.
_QUIETLY = 'exec "$@" >"$0.out" 2>"$0" </dev/null'
_SECTOR = 512  # bytes per block in the kernel's count of a process's reads


@dataclass(frozen=True, slots=True)
class LlamaFiles:
    """Programs and models, bytes of the target's layers, and prompts as text by id; from
    `bench.peers.llama_models`."""

    programs: Path
    target: Path
    draft: Path
    texts: Mapping[str, str]
    layer_bytes: int

    @classmethod
    def of(cls, programs: Path, made: str) -> LlamaFiles:
        """Parse the output of `bench.peers.llama_models`. Raises BenchError unless the programs exist."""
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
    """Return the settings to try without and with a draft: mapped weights, weights repacked for wider
    instructions (its default), fewer threads, and several draft lengths.

    fits: whether the memory limit exceeds the target's file. If not, repacking would be killed and threads
    would wait for the disk, so both are omitted.
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
    """Return the command. job: text, tokens, temperature, seed, context, threads, repack, maybe drafted."""
    drafted = job.get("drafted")
    words = [str(files.programs / (DRAFTED if drafted else ALONE)), "--model", str(files.target)]
    words += ["--prompt", job["text"], "--no-escape", "--predict", str(job["tokens"])]
    words += ["--ctx-size", str(job["context"]), "--threads", str(job["threads"])]
    words += ["--temp", str(job["temperature"]), "--seed", str(job["seed"])]
    words += ["--top-k", "0", "--top-p", "1", "--min-p", "0"]  # the whole distribution, as in offspec
    words += [] if job["repack"] else ["--no-repack"]
    if not drafted:
        return [*words, "--no-conversation", "--no-display-prompt"]
    return [
        *words, "--spec-type", "draft-simple", "--model-draft", str(files.draft),
        "--spec-draft-n-max", str(drafted),
    ]  # fmt: skip


def run(args: argparse.Namespace, files: LlamaFiles, name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Return one answer, to the prompt `name`, from a separate measured process.

    job: as in `command`, and `seconds`, its time limit. Raises BenchError if the process fails, is killed, or
    reports nothing.
    """
    before = _blocks_read()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        argv = ["timeout", str(job["seconds"]), *command(files, job)]
        _, peaks = run_measured(args, ["/bin/sh", "-c", _QUIETLY, str(log), *argv])
        log_text, output = (file.read_text("utf-8", "replace") for file in (log, Path(f"{log}.out")))
    figures = read_drafted(log_text) if job.get("drafted") else read_alone(log_text)
    text = output.strip().removeprefix(job["text"].strip()).strip()
    reads = _SECTOR * (_blocks_read() - before)
    whole = {"load_seconds": read_load(log_text), "load_read_bytes": 0, "threads": job["threads"], **peaks}
    return {**whole, "answers": [{"id": name, "text": text, "read_bytes": reads, **figures}]}


def _blocks_read() -> int:
    """Return the blocks read by all completed child processes."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_inblock


def read_alone(log: str) -> dict[str, Any]:
    """Return the figures of an answer in llama-completion's log. The prompt's pass yields the first token."""
    prompt, prompt_tokens = _timed(log, "prompt eval time")
    rest, runs = _timed(log, r"(?<!prompt )eval time")
    # Zero runs are reported as one that took no time.
    passes = [prompt] + ([rest / runs] * runs if rest else [])
    return _figures([1] * len(passes), passes, prompt_tokens)


def read_drafted(log: str) -> dict[str, Any]:
    """Return the figures of an answer in llama-speculative-simple's log. The prompt yields no token."""
    encoded = re.search(r"encoded +(\d+) tokens in +([\d.]+) seconds", log)
    decoded = re.search(r"decoded +(\d+) tokens in +([\d.]+) seconds", log)
    accepted = re.search(r"n_accept += (\d+)", log)
    if not (encoded and decoded and accepted):
        raise BenchError("llama.cpp's log has no figures of a speculative run")
    tokens, passes = int(decoded[1]), int(decoded[1]) - int(accepted[1])
    each = float(decoded[2]) / max(passes, 1)
    # Only the total is reported, so all passes are assumed to be alike.
    emitted = [tokens // passes + (turn < tokens % passes) for turn in range(passes)] if passes else []
    seconds = [float(encoded[2]) * (not turn) + each for turn in range(passes)]
    return {**_figures(emitted, seconds, int(encoded[1])), "decode_seconds": float(decoded[2])}


def read_load(log: str) -> float:
    found = re.search(r"load time = +([\d.]+) ms", log)
    return float(found[1]) / 1000 if found else 0.0


def _timed(log: str, what: str) -> tuple[float, int]:
    """Return seconds, and the number of tokens or runs that took them."""
    found = re.search(what + r" = +([\d.]+) ms / +(\d+) (?:tokens|runs)", log)
    if not found:
        raise BenchError("llama.cpp's log has no figures of a run")
    return float(found[1]) / 1000, int(found[2])


def _figures(emitted: Sequence[int], seconds: Sequence[float], prompt_tokens: int) -> dict[str, Any]:
    if not emitted:
        raise BenchError("llama.cpp generated no token")
    return {
        "tokens": sum(emitted),
        "passes": len(emitted),
        "prompt_tokens": prompt_tokens,
        "seconds": sum(seconds),
        "ttft_s": seconds[0],
        "per_pass": [{"emitted": e, "seconds": s} for e, s in zip(emitted, seconds, strict=True)],
    }

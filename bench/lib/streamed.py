"""The widened model that benches stream: made, its ceilings measured, and asked in a measured process."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.process import child, measured_job
from bench.lib.report import Prompt
from offspec.core.config import parse_bytes
from offspec_planners.measure import Bandwidth, read_bandwidth


def widened(args: argparse.Namespace) -> Path:
    """The folder of the model that `--model`, `--factor` and `--target` name, built on the first run."""
    place = [str(args.target)] if args.target else []
    return Path(child("bench.lib.widen", args.model, *place, "--factor", str(args.factor)))


def pack_of(target: Path, to: str = "nf4") -> str:
    """The folder of the target's pack, in the user's cache."""
    return child("offspec", "pack", str(target), "--to", to, "--quiet")


def raw_bandwidth(args: argparse.Namespace, files: Iterable[Path]) -> Bandwidth:
    """What two threads read with O_DIRECT from files just now: the better of two readings."""
    found, limit = list(files), parse_bytes(args.raw_bytes)
    readings = [read_bandwidth(found, limit_bytes=limit) for _ in range(2)]
    return max(readings, key=lambda reading: reading.bytes_per_s)


def layer_files(folder: Path, recipe: Mapping[str, Any]) -> list[Path]:
    return [folder / name for name in recipe["layer_files"]]


def product_rates(
    config: Mapping[str, Any], tokens: Iterable[int], dtype: str = "bfloat16"
) -> dict[int, float]:
    """FLOP/s of a model's largest matrix by tokens, measured in another process."""
    shape = ("--rows", str(config["intermediate_size"]), "--columns", str(config["hidden_size"]))
    words = ("--dtype", dtype, *shape, "--tokens", *map(str, tokens))
    return {rate["tokens"]: rate["flops_per_s"] for rate in json.loads(child("bench.lib.gemm_rates", *words))}


def ask(
    args: argparse.Namespace,
    folder: Path,
    group: Sequence[tuple[int, Prompt]],
    temperature: float,
    on: bool,
    module: str = "bench.lib.worker",
    **more: Any,
) -> dict[str, Any]:
    """Answers of one measured process, with the cgroup's peaks beside them.

    Args:
        args: of the bench; for the engine, the length of answers with and without speculation, the limits.
        group: prompts with their numbers, from which seeds are made.
        on: whether it speculates.
        module: of the process. more: what its job has besides.
    """
    job = {
        **more,
        "load": {
            "model": str(folder),
            "draft": args.draft if on else "none",
            "memory": args.engine_memory or args.memory,
            "device": "cpu",
            **{key: getattr(args, key) for key in ("draft_bits", "dtype", "budget", "width", "context")},
        },
        "params": {"temperature": temperature, "max_tokens": args.tokens if on else args.off_tokens},
        "seed": args.seed,
        "speculate": on,
        "check": on and args.check,
        "prompts": numbered(group),
    }
    found = measured_job(args, module, job)
    return {"speculate": on, "temperature": temperature, **found}


def numbered(group: Sequence[tuple[int, Prompt]]) -> list[dict[str, Any]]:
    """Prompts as a job has them."""
    return [{"number": number, "id": prompt.id, "text": prompt.prompt} for number, prompt in group]

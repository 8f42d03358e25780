"""The widened model for streaming benches: building it, measuring ceilings, running measured answers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.lib.process import child, measured_job
from bench.lib.report import Prompt
from offspec.core.values import parse_bytes
from offspec_planners.measure.disk import Bandwidth, read_bandwidth

_LOADED = ("draft_bits", "dtype", "budget", "width", "context")


def widened_model(args: argparse.Namespace) -> Path:
    """Return the folder of the model of `--model`, `--factor` and `--target`, built on the first run."""
    place = [str(args.target)] if args.target else []
    return Path(child("bench.lib.widen", args.model, *place, "--factor", str(args.factor)))


def pack_of(target: Path, to: str = "nf4") -> str:
    """Return the folder of the target's pack, in the user's cache."""
    return child("offspec", "pack", str(target), "--to", to, "--quiet")


def raw_bandwidth(args: argparse.Namespace, files: Iterable[Path]) -> Bandwidth:
    """Return the current O_DIRECT read rate of the files with two threads: the better of two measurements."""
    found, limit = list(files), parse_bytes(args.raw_bytes)
    readings = [read_bandwidth(found, limit_bytes=limit) for _ in range(2)]
    return max(readings, key=lambda reading: reading.bytes_per_s)


def layer_files(folder: Path, recipe: Mapping[str, Any]) -> list[Path]:
    return [folder / name for name in recipe["layer_files"]]


def ask(
    args: argparse.Namespace,
    folder: Path,
    group: Sequence[tuple[int, Prompt]],
    temperature: float,
    on: bool,
) -> dict[str, Any]:
    """Return answers of one measured process, with the cgroup's peaks.

    Args:
        args: Options of the bench: engine, length of answers with and without speculation, limits.
        folder: Folder of the model.
        group: Prompts with their numbers, which determine the seeds.
        temperature: Sampling temperature.
        on: Whether it speculates.
    """
    load = {key: getattr(args, key) for key in _LOADED}
    load |= {"model": str(folder), "draft": args.draft if on else "none", "device": "cpu"}
    job = {
        "load": {**load, "memory": args.engine_memory or args.memory},
        "params": {"temperature": temperature, "max_tokens": args.tokens if on else args.off_tokens},
        "seed": args.seed,
        "speculate": on,
        "prompts": numbered(group),
    }
    found = measured_job(args, "bench.lib.worker", job)
    return {"speculate": on, "temperature": temperature, **found}


def numbered(group: Sequence[tuple[int, Prompt]]) -> list[dict[str, Any]]:
    """Return prompts in the form of a job."""
    return [{"number": number, "id": prompt.id, "text": prompt.prompt} for number, prompt in group]

"""Experts by need: an upcycled mixture on disk, in a memory that holds a third of its experts.

    python -m bench.upcycle [--experts 16 --chosen 4 --skew 0] [--llama-cpp FOLDER] [--prompts 2]

The target is the small model as a mixture of experts (`bench/lib/upcycling.py`, built on the first run). It
answers with all layers streamed whole and trees as they are planned for that; with experts read when they are
asked for, without a draft, with large trees and with priced trees; and in llama.cpp, from a GGUF file of the
same bits that is mapped into memory. Each answer is a process of its own, in a cgroup of the same memory and
behind an empty page cache; ways take turns. Figures are of the passes behind an answer's first one.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import child, tell_liberties
from bench.lib.record import keep
from bench.lib.report import Report, model_name, read_prompts
from bench.lib.streamed import layer_files, raw_bandwidth
from bench.lib.upcycle import mixture_options, read_recipe
from bench.peers import llama as peers_llama
from bench.upcycle.jobs import llama_files, measure
from bench.upcycle.tally import LLAMA, LLAMA_DRAFTED, TITLES, Ceiling, fastest, figures, ratios, shortfalls
from bench.upcycle.view import NOTE, show, show_ceiling
from offspec.core.config import parse_bytes


def upcycled(args: argparse.Namespace) -> Path:
    """The folder of the mixture, built on the first run."""
    words = [str(args.target)] if args.target else []
    for name in ("experts", "chosen", "skew", "factor"):
        words += [f"--{name}", str(getattr(args, name))]
    return Path(child("bench.lib.upcycle", args.model, *words))


def find_ceiling(args: argparse.Namespace, folder: Path, recipe: dict[str, Any]) -> Ceiling:
    bandwidth = raw_bandwidth(args, layer_files(folder, recipe)).bytes_per_s
    asked = len(recipe["layer_files"]) * recipe["mixture"]["chosen"]
    return Ceiling(bandwidth, recipe["expert_bytes"], asked, 1 - args.share)


def memory_of(args: argparse.Namespace, recipe: dict[str, Any]) -> int:
    """The cgroup's bytes: those given, or what holds a share of the experts beside all else."""
    if args.memory:
        return int(parse_bytes(args.memory))
    dense = recipe["total_bytes"] - recipe["experts_bytes"]
    return int(recipe["experts_bytes"] * args.share + dense + parse_bytes(args.aside))


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "target", "seed", "keep_caches", "no_cgroup", "memory", "engine_memory", draft_bits=4)
    shared(p, prompts=2, tokens=96, off_tokens=32, context=1024, raw_bytes="1GB", dtype="bfloat16")
    mixture_options(p)
    p.add_argument("--share", type=float, default=1 / 3, help="of the experts, held in memory (default 1/3)")
    p.add_argument("--aside", default="1GB",
                   help="of the memory, for what is no weight of the target (default 1GB)")  # fmt: skip
    p.add_argument("--only", nargs="+", choices=list(TITLES), metavar="WAY",
                   help=f"measure some: {', '.join(TITLES)}")  # fmt: skip
    p.add_argument("--llama-cpp", type=Path, metavar="FOLDER",
                   help=f"also run llama.cpp: a {peers_llama.BUILDING}")  # fmt: skip
    p.add_argument("--peer-tokens", type=int, default=12, help="most new tokens of llama.cpp (default 12)")
    p.add_argument("--peer-seconds", type=int, default=300, help="a peer's process is ended after so long")
    p.set_defaults(check=False)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build what is missing, measure and tell; the record keeps what was measured of other mixtures."""
    args.only = args.only or [way for way in TITLES if args.llama_cpp or way not in (LLAMA, LLAMA_DRAFTED)]
    folder = upcycled(args)
    recipe = read_recipe(folder)
    memory = memory_of(args, recipe)
    args.memory = str(memory)
    ceiling = find_ceiling(args, folder, recipe)
    show_ceiling(ceiling, recipe, report)
    liberties = tell_liberties(args, report)
    runs = measure(args, folder, llama_files(args, folder), read_prompts(args.prompts), report)
    found = {way: fastest([run for run in runs if run["way"] == way]) for way in args.only}
    ways_found = {way: figures(own, recipe["expert_bytes"]) for way, own in found.items()}
    for way, own in found.items():
        ways_found[way]["settings"] = own[0]["settings"]
    mixture = recipe["mixture"]
    parts = mixture["experts"] / mixture["chosen"]
    row = {
        "case": folder.name,
        "order": [parts, mixture["skew"], mixture["factor"], folder.name],
        "command": report.command,
        "mixture": mixture,
        "memory_bytes": memory,
        "expert_bytes": recipe["expert_bytes"],
        "experts_bytes": recipe["experts_bytes"],
        "total_bytes": recipe["total_bytes"],
        "shares": recipe["shares"],
        "ceiling_tokens_per_s": ceiling.tokens_per_s,
        "raw_bytes_per_s": ceiling.bandwidth,
        "liberties": liberties,
        "load_average": os.getloadavg(),  # where it is far above what one way keeps busy, others worked
        "ways": ways_found,
        "ratios": ratios(ways_found),
    }
    show(row, report)
    row["shortfalls"] = shortfalls(row["ratios"], parts, mixture["skew"])
    for text in row["shortfalls"]:
        report.missed(text)
    keys = ("tokens", "off_tokens", "prompts", "context", "draft_bits", "dtype", "seed")
    row |= {**{key: getattr(args, key) for key in keys}, "draft": model_name(args.model)}
    keep(report, {"note": NOTE}, row)
    return row


main = Command("upcycle", "Experts by need, on an upcycled model.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

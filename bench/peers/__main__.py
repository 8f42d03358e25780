"""offspec compared with common alternatives: same model, prompts, draft, memory limit and disk.

    python -m bench.peers [--prompts 2] [--temperatures 0 1.0] [--only offspec accelerate ...]

Contenders: offspec; offspec without speculation; accelerate's disk offload; transformers' assisted generation
with that offload and the same draft as offspec. With --llama-cpp also contenders with a quantized target:
offspec on a pack and on llama.cpp's own GGUF file, llama.cpp, and its speculation. Each measured run is a
process in a memory cgroup, started with an empty page cache; bytes read are counted by the kernel for all
alike. Peers from PyPI run in a separate environment (`env.py`). On the first prompt a peer is tried with
several settings, and the fastest is used. A peer that generates one token per pass is run for a few tokens
and projected to offspec's number: first token, then its median pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import child, note_unmet_limits
from bench.lib.report import Prompt, Report, environment, model_name, read_prompts
from bench.lib.streamed import layer_files, raw_bandwidth, widened_model
from bench.lib.widen import read_recipe
from bench.peers import env as peers_env
from bench.peers.jobs import (
    ACCELERATE,
    ASSISTED,
    CONTENDERS,
    LLAMA,
    LLAMA_DRAFTED,
    PLAIN,
    TITLES,
    BenchSetup,
    prepare,
    run,
    variants,
)
from bench.peers.llama import BUILDING, DRAFT_LENGTHS
from bench.peers.summary import DECODING, GOALS, fastest, our_answers, shortfalls, speed_ups, summarize
from bench.peers.view import NOTE, ceiling_json, show, show_ceiling
from offspec.core.values import parse_bytes
from offspec_planners.units import format_bytes


def measure(
    args: argparse.Namespace, setup: BenchSetup, prompts: Sequence[Prompt], report: Report
) -> list[dict[str, Any]]:
    """Run every contender on every prompt, in rotating order; all settings on the first prompt."""
    runs: list[dict[str, Any]] = []
    turn = 0
    for number, prompt in enumerate(prompts):
        for temperature in args.temperatures:
            disk = raw_bandwidth(args, layer_files(setup.target, setup.recipe)).bytes_per_s
            report.progress(f"T {temperature:g}, {prompt.id}, disk {format_bytes(disk)}/s")
            for contender in args.only[turn % len(args.only) :] + args.only[: turn % len(args.only)]:
                for variant in _settings(args, setup, runs, contender, temperature):
                    report.progress(f"{TITLES[contender]} {variant.name}".rstrip())
                    found = run(args, setup, variant, [(number, prompt)], temperature)
                    if "error" in found:
                        report.progress(f"  {found['error']['kind']}: {found['error']['message']}")
                    runs.append({**found, "prompt": prompt.id, "raw_bytes_per_s": disk})
            turn += 1
    return runs


def _settings(
    args: argparse.Namespace,
    setup: BenchSetup,
    runs: list[dict[str, Any]],
    contender: str,
    temperature: float,
) -> list[Any]:
    """Return the settings to run: all at first, then the fastest; none if all failed."""
    before = [r for r in runs if (r["contender"], r["temperature"]) == (contender, temperature)]
    if setup.error and contender in (ACCELERATE, ASSISTED):
        if not before:
            place = {"contender": contender, "variant": "", "temperature": temperature, "prompt": ""}
            runs.append({**place, "error": setup.error})
        return []
    found = variants(args, setup, contender)
    if not before:
        return found
    on = our_answers([run for run in runs if run["temperature"] == temperature], contender)
    best = fastest(before, {name: answer["tokens"] for name, answer in on.items()})
    return [variant for variant in found if variant.name == best]


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "engine_memory", "off_tokens", "temperatures", "seed", "raw_bytes")
    shared(p, "keep_caches", "no_cgroup", memory="1.5GB", prompts=2, tokens=48, budget=128, width=16)
    shared(p, context=1024)
    p.add_argument("--peer-memory", default="600MB", help="RAM for a peer's weights (default 600MB)")
    p.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME",
                   help=f"run only these contenders: {', '.join(CONTENDERS)}")  # fmt: skip
    p.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"also run llama.cpp: a {BUILDING}")
    p.add_argument("--pack", choices=("nf4", "int4-g64"), default="nf4",
                   help="format of offspec's own pack (default nf4)")  # fmt: skip
    p.add_argument("--draft-lengths", type=int, nargs="+", default=list(DRAFT_LENGTHS), metavar="TOKENS",
                   help="draft lengths to try with llama.cpp (default 4 8 16)")  # fmt: skip
    p.add_argument("--peer-seconds", type=int, default=600, help="time limit of a peer's process")
    # The draft is a checkpoint whose weights already have 4-bit values, so there is no option for it.
    p.set_defaults(draft_bits=16, dtype="bfloat16")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build missing files, measure and report; a target is missed if speculation changed an answer."""
    args.only = args.only or list(CONTENDERS if args.llama_cpp else PLAIN)
    prompts = read_prompts(args.prompts)
    target = widened_model(args)
    draft = Path(child("bench.lib.quantized_draft", args.model))
    args.draft, recipe = str(draft), read_recipe(target)
    setup = prepare(args, target, recipe, draft)
    ceiling = ceiling_json(raw_bandwidth(args, layer_files(target, recipe)), setup)
    show_ceiling(ceiling, report)
    liberties = note_unmet_limits(args, report)
    runs = measure(args, setup, prompts, report)
    rows = [summarize(runs, temperature) for temperature in args.temperatures]
    keys = ("factor", "dtype", "budget", "width", "context", "tokens", "off_tokens", "seed")
    summary = {
        **report.head(args, *keys, "only", "pack"),
        "model": target.name,
        "draft": f"{model_name(args.model)} quantized to 4 bits, as a bfloat16 checkpoint",
        "memory_bytes": parse_bytes(args.memory),
        "peer_weights_in_ram_bytes": parse_bytes(args.peer_memory),
        "prompts": [prompt.id for prompt in prompts],
        "liberties": liberties,
        "ceiling": ceiling,
        "speedup_vs_accelerate": speed_ups(rows, ACCELERATE),
        "speedup_vs_assisted": speed_ups(rows, ASSISTED),
        "speedup_vs_llama_cpp": speed_ups(rows, LLAMA),
        "speedup_vs_llama_cpp_drafted": speed_ups(rows, LLAMA_DRAFTED),
        "decoding_vs_llama_cpp": speed_ups(rows, LLAMA, DECODING),
        "decoding_vs_llama_cpp_drafted": speed_ups(rows, LLAMA_DRAFTED, DECODING),
        "aims": GOALS,
        "runs": rows,
        "shortfalls": shortfalls(rows, args.only),
        "note": NOTE,
    }
    show(summary, report)
    machine = {**environment(), "peers": peers_env.pinned()}
    report.record(summary, environment=machine, processes=runs)
    for sentence in summary["shortfalls"]:
        report.missed(sentence)
    return summary


main = Command("peers", "offspec compared with its peers.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

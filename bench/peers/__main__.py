"""offspec beside what people use today: the same model, prompts, draft, memory limit and disk.

    python -m bench.peers [--prompts 2] [--temperatures 0 1.0] [--only offspec accelerate ...]

Contenders: offspec; offspec without speculation; accelerate's disk offload; transformers' assisted
generation over it, with the very draft that offspec has; AirLLM. With --llama-cpp also those whose target is
quantised (`peers_quantised.py`): offspec on an NF4 pack and on llama.cpp's own GGUF file, llama.cpp, and its
speculation. Each measured run is a process of its own in a memory cgroup, started with an empty page
cache; bytes read are those that the kernel counts for all alike. Peers from PyPI run in an environment of
their own (`peers_env.py`). On the first prompt a peer is tried with several settings, and the fastest counts.
A peer that gives a token a pass is run for a few tokens and projected to offspec's number: first token, then
its median pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.lib.plots import plot_file
from bench.lib.report import (
    Prompt,
    Report,
    command_line,
    environment,
    model_name,
    read_prompts,
    write_result,
)
from bench.lib.widen import read_recipe
from bench.offload.__main__ import child, liberties_of, raw_bandwidth, target_options, widened
from bench.peers import env as peers_env
from bench.peers import quantised as peers_quantised
from bench.peers.jobs import ACCELERATE, ASSISTED, CONTENDERS, PLAIN, TITLES, Scene, prepare, run, variants
from bench.peers.llama import BUILDING
from bench.peers.quantised import LLAMA, LLAMA_DRAFTED
from bench.peers.tally import GOALS, fastest, our_answers, shortfalls, speed_ups, summarise
from bench.peers.view import NOTE, ceiling_json, plot, show, show_ceiling
from offspec.core.config import format_bytes, parse_bytes
from offspec.core.errors import OffspecError

NAME = "peers"


def measure(
    args: argparse.Namespace, scene: Scene, prompts: Sequence[Prompt], report: Report
) -> list[dict[str, Any]]:
    """Every contender on every prompt, the order turned each time; on the first prompt with all settings."""
    runs: list[dict[str, Any]] = []
    turn = 0
    for number, prompt in enumerate(prompts):
        for temperature in args.temperatures:
            disk = raw_bandwidth(args, scene.target, dict(scene.recipe)).bytes_per_s
            report.progress(f"T {temperature:g}, {prompt.id}, disk {format_bytes(disk)}/s")
            wanted = args.only[turn % len(args.only) :] + args.only[: turn % len(args.only)]
            for contender in wanted:
                for variant in _settings(args, scene, runs, contender, temperature):
                    report.progress(f"{TITLES[contender]} {variant.name}".rstrip())
                    found = run(args, scene, variant, [(number, prompt)], temperature)
                    if "error" in found:
                        report.progress(f"  {found['error']['kind']}: {found['error']['message']}")
                    runs.append({**found, "prompt": prompt.id, "raw_bytes_per_s": disk})
            turn += 1
    return runs


def _settings(
    args: argparse.Namespace,
    scene: Scene,
    runs: list[dict[str, Any]],
    contender: str,
    temperature: float,
) -> list[Any]:
    """What a contender is run with now: all settings at first, then the fastest; none where all failed."""
    before = [r for r in runs if (r["contender"], r["temperature"]) == (contender, temperature)]
    if contender in scene.errors:
        if not before:
            place = {"contender": contender, "variant": "", "temperature": temperature, "prompt": ""}
            runs.append({**place, "error": scene.errors[contender]})
        return []
    found = variants(contender, scene, parse_bytes(args.peer_memory))
    if not before:
        return found
    on = our_answers([run for run in runs if run["temperature"] == temperature], contender)
    best = fastest(before, {name: answer["tokens"] for name, answer in on.items()})
    return [variant for variant in found if variant.name == best]


def parser() -> argparse.ArgumentParser:
    """The command line of this bench. Some names are those that bench.offload's worker looks for."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="offspec and its peers, side by side."
    )
    target_options(p)
    p.add_argument("--memory", default="1.5GB", help="the cgroup's limit for each contender (default 1.5GB)")
    p.add_argument("--engine-memory", help="what offspec's engine is promised (default: the limit)")
    p.add_argument("--peer-memory", default="600MB", help="weights a peer may keep in RAM (default 600MB)")
    p.add_argument("--only", nargs="+", choices=CONTENDERS, metavar="NAME",
                   help=f"run some contenders: {', '.join(CONTENDERS)}")  # fmt: skip
    p.add_argument("--llama-cpp", type=Path, metavar="FOLDER", help=f"also run llama.cpp: a {BUILDING}")
    p.add_argument("--prompts", type=int, default=2)
    p.add_argument(
        "--tokens", type=int, default=48, help="most new tokens of offspec and of assisted generation"
    )
    p.add_argument("--off-tokens", type=int, default=8, help="most new tokens without speculation")
    p.add_argument("--airllm-tokens", type=int, default=4, help="most new tokens of AirLLM")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--budget", type=int, default=128)
    p.add_argument("--width", type=int, default=16)
    p.add_argument("--context", type=int, default=1024, help="of offspec, whose cache is set aside for it")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--peer-seconds", type=int, default=600, help="a peer's process is ended after so long")
    p.add_argument("--raw-bytes", default="2GB", help="how much is read to find the raw rate (default 2GB)")
    p.add_argument("--keep-caches", action="store_true", help="do not drop the page cache (needs no root)")
    p.add_argument("--no-cgroup", action="store_true", help="do not limit the memory (needs no root)")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    # The draft is a checkpoint whose weights are 4-bit values already; there is nothing to set.
    p.set_defaults(draft_bits=16, dtype="bfloat16", check=False)
    return p


def bench(args: argparse.Namespace, words: Sequence[str], report: Report) -> tuple[dict[str, Any], list[str]]:
    """Build what is missing, measure, print, write; returns the last line's object and what fell short."""
    args.only = args.only or list(CONTENDERS if args.llama_cpp else PLAIN)
    prompts = read_prompts(args.prompts)
    target = widened(args)
    quantised = peers_quantised.prepare(args, target)
    draft = Path(child("bench.lib.quantised_draft", args.model).splitlines()[-1])
    args.draft, recipe = str(draft), read_recipe(target)
    scene = replace(prepare(target, recipe, draft, args.only), quantised=quantised)
    ceiling = ceiling_json(raw_bandwidth(args, target, recipe), recipe, quantised)
    show_ceiling(ceiling, report)
    liberties = liberties_of(args)
    if liberties:
        report.note("measured without " + " and without ".join(liberties))
    runs = measure(args, scene, prompts, report)
    rows = [summarise(runs, temperature) for temperature in args.temperatures]
    keys = (
        "factor",
        "dtype",
        "budget",
        "width",
        "context",
        "tokens",
        "off_tokens",
        "airllm_tokens",
        "seed",
        "only",
    )
    summary = {
        "bench": NAME,
        "model": target.name,
        "draft": f"{model_name(args.model)} rounded to 4 bits, as a bfloat16 checkpoint",
        "memory_bytes": parse_bytes(args.memory),
        "peer_weights_in_ram_bytes": parse_bytes(args.peer_memory),
        **{key: getattr(args, key) for key in keys},
        "prompts": [prompt.id for prompt in prompts],
        "liberties": liberties,
        "ceiling": ceiling,
        "speedup_vs_accelerate": speed_ups(rows, ACCELERATE),
        "speedup_vs_assisted": speed_ups(rows, ASSISTED),
        "speedup_vs_llama_cpp": speed_ups(rows, LLAMA),
        "speedup_vs_llama_cpp_drafted": speed_ups(rows, LLAMA_DRAFTED),
        "aims": GOALS,
        "runs": rows,
        "shortfalls": shortfalls(rows, args.only),
        "note": NOTE,
    }
    show(summary, report)
    report.note(plot(rows, target.name, plot_file(NAME, args.json)))
    machine = {**environment(), "peers": peers_env.pinned()}
    command = command_line(f"bench.{NAME}", words)
    write_result(NAME, {**summary, "command": command, "environment": machine, "processes": runs}, args.json)
    return summary, list(summary["shortfalls"])


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON. Exit code 1 where an aim was not reached,
    or where speculation changed an answer."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    try:
        summary, short = bench(args, words, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for sentence in short:
        report.note(sentence)
    report.last_line(summary)
    return 1 if short else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

"""What each way of answering is run as: an engine's process, or llama.cpp's."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.process import child
from bench.lib.report import Prompt, Report
from bench.lib.streamed import ask, layer_files, raw_bandwidth
from bench.lib.upcycle import read_recipe
from bench.peers import llama as peers_llama
from bench.peers.llama import LlamaFiles
from bench.upcycle.tally import LARGE, LLAMA, LLAMA_DRAFTED, OFF, STREAMED, TITLES
from offspec.core.config import format_bytes

Run = Callable[[], dict[str, Any]]

_LARGE_TREES = {"budget": 256, "width": 32}
_ONE_ROW = {"budget": 1, "width": 1}
_PLANNED = {"budget": None, "width": None}


def llama_files(args: argparse.Namespace, folder: Path) -> LlamaFiles | None:
    """What llama.cpp needs, where it is asked; its GGUF file is written on the first run."""
    if not {LLAMA, LLAMA_DRAFTED} & set(args.only):
        return None
    if args.llama_cpp is None:
        raise BenchError(f"llama.cpp needs --llama-cpp, a {peers_llama.BUILDING}")
    words = (str(folder), "--model", args.model, "--prompts", str(args.prompts))
    return LlamaFiles.of(args.llama_cpp.resolve(), child("bench.peers.llama_mixture", *words))


def measure(
    args: argparse.Namespace,
    folder: Path,
    files: LlamaFiles | None,
    prompts: Sequence[Prompt],
    report: Report,
) -> list[dict[str, Any]]:
    """Every way on every prompt, the order turned each time; the disk is measured before each."""
    runs = []
    recipe = read_recipe(folder)
    for number, prompt in enumerate(prompts):
        turn = number % len(args.only)
        for way in args.only[turn:] + args.only[:turn]:
            for settings, run in ways(args, folder, files, way, (number, prompt)).items():
                raw = raw_bandwidth(args, layer_files(folder, recipe)).bytes_per_s
                report.progress(f"{prompt.id}, {TITLES[way]} {settings}, disk {format_bytes(raw)}/s")
                try:
                    found = run()
                except BenchError as error:
                    report.progress(f"  failed: {error}")
                    found = {"error": str(error)}
                about = {"way": way, "settings": settings, "prompt": prompt.id, "raw_bytes_per_s": raw}
                runs.append({**about, **found})
    return runs


def ways(
    args: argparse.Namespace, folder: Path, files: LlamaFiles | None, way: str, one: tuple[int, Prompt]
) -> dict[str, Run]:
    """By settings, what runs them. Those of a contender with several are all tried."""
    if way in (LLAMA, LLAMA_DRAFTED):
        assert files is not None, "who asks llama.cpp has its files"
        return llama_ways(args, files, way, one)
    trees = {LARGE: _LARGE_TREES, OFF: _ONE_ROW}.get(way, _PLANNED)
    asked = argparse.Namespace(**{**vars(args), "draft": args.model, **trees})
    speculates, by_need = way != OFF, way != STREAMED

    def run(replan: bool = False, tokens: int | None = None) -> dict[str, Any]:
        own = argparse.Namespace(**{**vars(asked), "tokens": tokens or asked.tokens})
        return ask(
            own, folder, [one], 0.0, speculates, "bench.upcycle.worker", by_need=by_need, replan=replan
        )

    def planned() -> dict[str, Any]:
        """With a plan of its own from the start: a run that makes one has loaded the draft to try it."""
        run(replan=True, tokens=1)
        return run()

    return {"": planned if trees is _PLANNED else run}


def llama_ways(
    args: argparse.Namespace, files: LlamaFiles, way: str, one: tuple[int, Prompt]
) -> dict[str, Run]:
    number, prompt = one
    tried = peers_llama.settings(len(os.sched_getaffinity(0)))[
        peers_llama.ALONE if way == LLAMA else peers_llama.DRAFTED
    ]
    job = {
        "text": files.texts[prompt.id],
        "tokens": args.peer_tokens,
        "temperature": 0.0,
        "seed": args.seed + number,
        "context": args.context,
        "seconds": args.peer_seconds,
    }
    # Copied in another order for wider instructions, all experts would have to be in RAM.
    mapped = {name: settings for name, settings in tried.items() if not settings["repack"]}
    return {
        name: partial(peers_llama.run, args, files, prompt.id, {**job, **settings})
        for name, settings in mapped.items()
    }

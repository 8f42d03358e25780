"""The first token of a conversation whose keys and values are on disk, in passes of a streamed model.

    python -m bench.prefixes [--length 4096] [--memory 1.5GB] [--kv-cache int8] [--rounds 3]

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run), without a draft. A conversation of random
tokens is answered, another puts it out of the cache, and it goes on with a question more: in the same engine,
and in new ones, after restarts. The time has in it what the request waits for, the other conversation being
written too. Files are not in the page cache when they are read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from bench.lib.command import Command, shared
from bench.lib.report import Report, ratio
from bench.lib.streamed import layer_files, raw_bandwidth, widened
from offspec.checkpoint.widen import read_recipe
from offspec.core.config import format_bytes, parse_bytes

if TYPE_CHECKING:
    from offspec import Engine

WANTED = 1.3  # passes
_OTHER = 512  # tokens of the conversation between
_ANSWER = 6  # tokens, one a pass, whose median is what a pass takes
_QUESTION = 24  # tokens more
_IDLE_S = (
    2.0  # from a start to the first request: the first layers are read by then, as they are between answers
)


def ids(count: int, seed: int) -> list[int]:
    """Of random tokens."""
    chosen = random.Random(seed)
    return [chosen.randrange(100, 1000) for _ in range(count)]


@contextmanager
def opened(args: argparse.Namespace, folder: Path, scratch: Path) -> Iterator[Engine]:
    """An engine that keeps conversations in a folder of the bench."""
    import offspec

    with (
        mock.patch("offspec.engine.prefixes.cache_root", lambda: scratch),
        offspec.load(
            str(folder), draft="none", budget=1, width=1, memory=parse_bytes(args.memory), dtype=args.dtype,
            kv_cache=args.kv_cache, context=args.length + 256, cache_size="100GB",
            device="cpu", learn=False,
        ) as engine,
    ):  # fmt: skip
        yield engine


def answer(engine: Engine, prompt: list[int], name: str, report: Report) -> dict[str, Any]:
    """One answer: when its first token came, what was reused, and what its passes took."""
    from offspec import SamplingParams
    from offspec.core.events import Finished, PassStats

    passes, result = list[float](), None
    for event in engine.stream(prompt, SamplingParams(max_tokens=_ANSWER, ignore_eos=True)):
        if isinstance(event, PassStats):
            passes.append(event.draft_seconds + event.target_seconds)
        elif isinstance(event, Finished):
            result = event.result
    assert result is not None
    report.progress(f"{name}: first token after {result.ttft_s:.2f} s, {result.reused_tokens} tokens reused")
    return {
        "name": name,
        "prompt_tokens": result.prompt_tokens,
        "reused_tokens": result.reused_tokens,
        "ttft_seconds": result.ttft_s,
        "pass_seconds": passes[1:],
        "token_ids": list(result.token_ids),
    }


def forget(folder: Path) -> int:
    """Have the files of a folder out of the page cache; the bytes of the largest."""
    from offspec.checkpoint.checksum import forget_pages

    sizes = [0]
    for path in (folder / "prefixes").glob("*"):
        with path.open("rb") as file:
            forget_pages(file.fileno(), 0, 0)
        sizes.append(path.stat().st_size)
    return max(sizes)


def measure(args: argparse.Namespace, folder: Path, scratch: Path, report: Report) -> list[dict[str, Any]]:
    """Answers of two conversations in turn, and of the first after restarts: each time the same question."""
    first, other = ids(args.length, 1), ids(min(_OTHER, args.length), 2)
    runs = list[dict[str, Any]]()

    def ask(engine: Engine, prompt: list[int], name: str) -> list[int]:
        run = answer(engine, prompt, name, report)
        runs.append(run | {"file_bytes": forget(scratch)})
        return [*prompt, *run["token_ids"], *ids(_QUESTION, 3)]

    with opened(args, folder, scratch) as engine:
        longer = ask(engine, first, "cold")
        another = ask(engine, other, "another, cold")
        for _ in range(args.rounds):
            ask(engine, longer, "from disk")
            ask(engine, another, "another")
    for _ in range(args.rounds):
        with opened(args, folder, scratch) as engine:
            time.sleep(_IDLE_S)
            ask(engine, longer, "after a restart")
    return runs


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "dtype", "raw_threads", memory="1.5GB", raw_bytes="2GB")
    p.add_argument("--length", type=int, default=4096, help="tokens of the conversation (default 4096)")
    p.add_argument(
        "--rounds", type=int, default=3, help="answers of which each figure is the median (default 3)"
    )
    p.add_argument("--kv-cache", choices=("model", "int8"), default="model")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build what is missing, measure and tell; short of its aim where a first token takes too many passes."""
    from offspec.core.cache_dir import cache_root

    folder = widened(args)
    recipe = read_recipe(folder)
    disk = raw_bandwidth(args, layer_files(folder, recipe)).bytes_per_s
    link = ratio(recipe["layer_bytes"], disk)
    report.ceiling(
        f"{link:.2f} s a pass from the disk: {format_bytes(recipe['layer_bytes'])} at {format_bytes(disk)}/s"
    )
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_root()) as scratch:
        size = row_bytes(folder, args) * args.length
        report.ceiling(
            f"{ratio(size, disk):.2f} s for a conversation of {args.length} tokens, {format_bytes(size)}, at "
            f"that rate: {1 + ratio(size, disk * link):.2f} passes to the first token"
        )
        runs = measure(args, folder, Path(scratch), report)
    seconds = statistics.median(took for run in runs for took in run["pass_seconds"])
    named = {run["name"]: [other for other in runs if other["name"] == run["name"]] for run in runs}
    found = {
        name: statistics.median(ratio(run["ttft_seconds"], seconds) for run in these)
        for name, these in named.items()
    }
    for name in ("cold", "from disk", "after a restart"):
        report.reached(f"{name}: first token after {found[name]:.2f} passes of {seconds:.2f} s")
    summary = {
        **report.head(args, "length", "factor", "dtype", "kv_cache", "memory"),
        "raw_bytes_per_s": disk,
        "file_bytes": max(run["file_bytes"] for run in runs),
        "pass_seconds": seconds,
        "passes_to_first_token": found,
        "reused": {
            name: ratio(these[0]["reused_tokens"], these[0]["prompt_tokens"]) for name, these in named.items()
        },
    }
    report.record(summary, runs=runs)
    for name in ("from disk", "after a restart"):
        if found[name] > WANTED:
            report.missed(f"{name}: {found[name]:.2f} passes to the first token, more than {WANTED}")
    return summary


def row_bytes(folder: Path, args: argparse.Namespace) -> int:
    """Bytes that a position takes in the cache."""
    import torch

    from offspec.checkpoint import open_checkpoint
    from offspec.model.loaded import LoadedModel

    checkpoint = open_checkpoint(str(folder))
    dtype, int8 = getattr(torch, args.dtype), args.kv_cache == "int8"
    device = torch.device("cpu")
    model = LoadedModel(checkpoint.folder, checkpoint.tensors, dtype, device, int8_cache=int8)
    try:
        return model.cache_bytes(1)
    finally:
        model.close()


main = Command("prefixes", "The first token of a conversation on disk.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

"""A streamed model under a memory cap, with speculation off and on in turns.

    python -m bench.offload [--memory 1.5GB] [--temperatures 0 1.0] [--prompts 4]

Target: SmolLM2-135M-Instruct widened ×4 (built on the first run). Draft: the small model in 4 bits, which
is not the same function. Every measured run is a process of its own in a memory cgroup, started with an
empty page cache. Off is run for fewer tokens, since each costs a whole pass and the rate is steady; for the
speed-up its time is projected to on's number of tokens: first token, then the median pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.lib.bandwidth import Bandwidth, read_bandwidth
from bench.lib.cgroup import BenchError, MemoryCgroup, drop_caches
from bench.lib.report import (
    Prompt,
    Report,
    command_line,
    environment,
    model_name,
    read_prompts,
    write_result,
)
from bench.lib.tally import Ceiling, tally
from bench.lib.widen import read_recipe
from bench.offload.view import NOTE, show, show_ceiling
from offspec.core.config import format_bytes, parse_bytes
from offspec.core.errors import OffspecError

NAME = "offload"
_ROOT = Path(__file__).parents[2]


def child(module: str, *words: str) -> str:
    """Run a module as a process of its own, outside the cgroup, and return its stdout."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words], stdout=subprocess.PIPE, text=True, cwd=_ROOT
    )
    if done.returncode:
        raise BenchError(f"python -m {module} failed with exit code {done.returncode}; see above")
    return done.stdout


def target_options(p: argparse.ArgumentParser) -> None:
    """Which widened model is measured; for `widened`."""
    p.add_argument("--model", default="demo", help="the small model that is widened (default demo)")
    p.add_argument("--factor", type=int, default=4)
    p.add_argument("--target", type=Path, help="folder of the widened model (default: in the user's cache)")


def widened(args: argparse.Namespace) -> Path:
    """The folder of the widened model that `target_options` name, built on the first run."""
    place = [str(args.target)] if args.target else []
    built = child("bench.lib.widen", args.model, *place, "--factor", str(args.factor))
    return Path(built.splitlines()[-1])


def find_ceiling(args: argparse.Namespace, folder: Path, recipe: dict[str, Any]) -> Ceiling:
    """Measure the disk on the model's own files, and the processor on its largest matrix."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    shape = ("--rows", str(config["intermediate_size"]), "--columns", str(config["hidden_size"]))
    counts = [str(count) for count in sorted({1, 16, 64, args.budget})]
    gemm = json.loads(child("bench.lib.bandwidth", "--dtype", args.dtype, *shape, "--tokens", *counts))
    return Ceiling(
        bandwidth=raw_bandwidth(args, folder, recipe),
        layer_bytes=recipe["layer_bytes"],
        head_bytes=recipe["head_bytes"],
        flops_per_token=2 * recipe["matmul_parameters"],
        gemm={rate["tokens"]: rate["flops_per_s"] for rate in gemm},
    )


def raw_bandwidth(args: argparse.Namespace, folder: Path, recipe: dict[str, Any]) -> Bandwidth:
    """What two threads read with O_DIRECT from the layers' files just now: the better of two readings."""
    files = [folder / name for name in recipe["layer_files"]]
    readings = [read_bandwidth(files, limit_bytes=parse_bytes(args.raw_bytes)) for _ in range(2)]
    return max(readings, key=lambda reading: reading.bytes_per_s)


def liberties_of(args: argparse.Namespace) -> list[str]:
    named = ((args.no_cgroup, "a memory cgroup"), (args.keep_caches, "dropping the caches"))
    return [name for taken, name in named if taken]


def run_worker(
    args: argparse.Namespace, folder: Path, group: Sequence[tuple[int, Prompt]], temperature: float, on: bool
) -> dict[str, Any]:
    """One measured process: its figures, with the cgroup's peaks beside them."""
    job = {
        "load": {
            "model": str(folder),
            "draft": args.draft if on else "none",
            "draft_bits": args.draft_bits,
            "memory": args.engine_memory or args.memory,
            "device": "cpu",
            "dtype": args.dtype,
            "budget": args.budget,
            "width": args.width,
            "context": args.context,
        },
        "params": {"temperature": temperature, "max_tokens": args.tokens if on else args.off_tokens},
        "seed": args.seed,
        "speculate": on,
        "check": on and args.check,
        "prompts": [{"number": number, "id": p.id, "text": p.prompt} for number, p in group],
    }
    argv = [sys.executable, "-m", f"bench.{NAME}", "--worker", json.dumps(job)]
    if not args.keep_caches:
        drop_caches()
    if args.no_cgroup:
        output = child(f"bench.{NAME}", "--worker", json.dumps(job))
        cgroup = {}
    else:
        with MemoryCgroup(parse_bytes(args.memory)) as limited:
            output = limited.run(argv, cwd=_ROOT)
        cgroup = {
            "cgroup_peak_bytes": limited.use.peak,
            "cgroup_anon_peak_bytes": limited.use.anon_peak,
        }
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {"speculate": on, "temperature": temperature, **figures, **cgroup}


def measure(
    args: argparse.Namespace, folder: Path, recipe: dict[str, Any], prompts: Sequence[Prompt], report: Report
) -> list[dict[str, Any]]:
    """Off and on in turns, the order changing each time, with the disk measured again before each pair."""
    runs = []
    numbered = list(enumerate(prompts))
    turn = 0
    for start in range(args.rounds):
        group = numbered[start :: args.rounds]
        if not group:
            continue
        for temperature in args.temperatures:
            bandwidth = raw_bandwidth(args, folder, recipe).bytes_per_s
            for on in (False, True) if turn % 2 == 0 else (True, False):
                report.progress(
                    f"speculation {'on' if on else 'off'}, T {temperature:g}, {len(group)} prompts, disk "
                    f"{format_bytes(bandwidth)}/s"
                )
                run = run_worker(args, folder, group, temperature, on)
                runs.append({**run, "raw_bytes_per_s": bandwidth})
            turn += 1
    return runs


def parser() -> argparse.ArgumentParser:
    """The command line of this bench."""
    p = argparse.ArgumentParser(
        prog=f"python -m bench.{NAME}", description="Speculation off and on, streamed."
    )
    target_options(p)
    p.add_argument("--draft", help="default: the small model")
    p.add_argument("--draft-bits", type=int, choices=(2, 3, 4, 16), default=4)
    p.add_argument("--memory", default="1.5GB", help="the cgroup's limit (default 1.5GB)")
    p.add_argument("--engine-memory", help="what the engine is promised (default: the limit)")
    p.add_argument("--prompts", type=int, default=4)
    p.add_argument("--rounds", type=int, default=2, help="the prompts are dealt into so many off-on pairs")
    p.add_argument("--tokens", type=int, default=48, help="most new tokens with speculation on")
    p.add_argument("--off-tokens", type=int, default=8, help="most new tokens with speculation off")
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    p.add_argument("--budget", type=int, default=256)
    p.add_argument("--width", type=int, default=32)
    p.add_argument("--context", type=int, help="tokens of prompt and answer (default: what fits)")
    p.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--raw-bytes", default="4GB", help="how much is read to find the raw rate (default 4GB)")
    p.add_argument("--check", action="store_true", help="decode on's whole answer again without speculation")
    p.add_argument("--keep-caches", action="store_true", help="do not drop the page cache (needs no root)")
    p.add_argument("--no-cgroup", action="store_true", help="do not limit the memory (needs no root)")
    p.add_argument(
        "--json", type=Path, metavar="OUT", help=f"result file (default bench/results/{NAME}.json)"
    )
    p.add_argument("--worker", help=argparse.SUPPRESS)
    return p


def bench(args: argparse.Namespace, words: Sequence[str], report: Report) -> dict[str, Any]:
    """Build what is missing, measure, print, and write the result; returns the last line's object."""
    prompts = read_prompts(args.prompts)
    folder = widened(args)
    args.draft = args.draft or args.model
    recipe = read_recipe(folder)
    ceiling = find_ceiling(args, folder, recipe)
    show_ceiling(ceiling, report)
    if liberties_of(args):
        report.note("measured without " + " and without ".join(liberties_of(args)))
    runs = measure(args, folder, recipe, prompts, report)
    keys = ("factor", "draft_bits", "dtype", "budget", "width", "context", "tokens", "off_tokens", "seed")
    summary = {
        "bench": NAME,
        "model": folder.name,
        "draft": f"draft {model_name(args.draft)} in {args.draft_bits} bits",
        "memory_bytes": parse_bytes(args.memory),
        **{key: getattr(args, key) for key in keys},
        "liberties": liberties_of(args),
        "ceiling": ceiling.to_json(args.budget),
        "runs": [tally(runs, temperature, ceiling) for temperature in args.temperatures],
        "note": NOTE,
    }
    show(summary, report)
    record = {**summary, "command": command_line(f"bench.{NAME}", words), "environment": environment()}
    write_result(NAME, {**record, "processes": runs}, args.json)
    return summary


def main(argv: list[str] | None = None) -> int:
    """Run the bench; the last line of stdout is one line of JSON. Exit code 1 where tokens differ."""
    words = sys.argv[1:] if argv is None else argv
    args, report = parser().parse_args(words), Report()
    if args.worker:
        from bench.lib.worker import main as worker

        return worker(args.worker)
    try:
        summary = bench(args, words, report)
    except OffspecError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    differing = sum(row["prompts_with_another_token"] for row in summary["runs"])
    if differing:
        report.note(f"{differing} answers differ between off and on: see where with offspec generate --check")
    report.last_line(summary)
    return 1 if differing else 0


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)

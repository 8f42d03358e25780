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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import tell_liberties
from bench.lib.report import Prompt, Report, grid, model_name, ratio, read_prompts
from bench.lib.streamed import ask, layer_files, product_rates, raw_bandwidth, widened
from bench.lib.tally import Ceiling, tally
from offspec.checkpoint.widen import read_recipe
from offspec.core.config import format_bytes, parse_bytes

NOTE = (
    "acceptance is that of a 135M pair: the widened target says what the small model says, and the draft is "
    "that small model rounded to 4 bits; the cost of a pass and the text are real"
)


def find_ceiling(args: argparse.Namespace, folder: Path, recipe: dict[str, Any]) -> Ceiling:
    """Measure the disk on the model's own files, and the processor on its largest matrix."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    gemm = product_rates(config, sorted({1, 16, 64, args.budget}), args.dtype)
    return Ceiling(
        bandwidth=raw_bandwidth(args, layer_files(folder, recipe)),
        layer_bytes=recipe["layer_bytes"],
        head_bytes=recipe["head_bytes"],
        flops_per_token=2 * recipe["matmul_parameters"],
        gemm=gemm,
    )


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
            bandwidth = raw_bandwidth(args, layer_files(folder, recipe)).bytes_per_s
            for on in (False, True) if turn % 2 == 0 else (True, False):
                report.progress(
                    f"speculation {'on' if on else 'off'}, T {temperature:g}, {len(group)} prompts, disk "
                    f"{format_bytes(bandwidth)}/s"
                )
                run = ask(args, folder, group, temperature, on)
                runs.append({**run, "raw_bytes_per_s": bandwidth})
            turn += 1
    return runs


def show_ceiling(ceiling: Ceiling, report: Report) -> None:
    """The floor of a pass from the disk and from the processor, before anything is run."""
    disk = ceiling.bandwidth
    how = "O_DIRECT" if disk.direct else "buffered: O_DIRECT was refused"
    report.ceiling(
        f"{ceiling.link_seconds:.2f} s a pass from the disk: {format_bytes(ceiling.layer_bytes)} of layers "
        f"at {format_bytes(disk.bytes_per_s)}/s ({how})"
    )
    for tokens, rate in sorted(ceiling.gemm.items()):
        report.ceiling(
            f"{ceiling.compute_seconds(tokens):.2f} s a pass of {tokens} tokens from the processor "
            f"({rate / 1e9:.0f} GFLOP/s)"
        )


def show(summary: dict[str, Any], report: Report) -> None:
    """One column for each temperature, then the shares of the ceiling."""
    title = f"{summary['model']} in {format_bytes(summary['memory_bytes'])}, {summary['draft']}"
    view = grid(title, "", *(f"T {row['temperature']:g}" for row in summary["runs"]))
    lines = (
        ("off, s a token", "off_seconds_per_token", "{:.2f}"),
        ("on, tokens a s", "on_tokens_per_s", "{:.2f}"),
        ("speed-up", "speed_up", "{:.2f}"),
        ("tokens a pass (135M pair)", "tokens_per_pass", "{:.2f}"),
        ("nodes a pass", "nodes_per_pass", "{:.0f}"),
        ("on, s a pass", "on_seconds_per_pass", "{:.2f}"),
        ("  of it draft, s", "on_draft_seconds_per_pass", "{:.2f}"),
        ("prompts with another token", "prompts_with_another_token", "{}"),
        ("link use, off", "off_link_use", "{:.2f}"),
        ("link use, on", "on_link_use", "{:.2f}"),
    )
    for label, key, form in lines:
        view.add_row(label, *(form.format(row[key]) for row in summary["runs"]))
    for label, key in (
        ("peak of the cgroup, page cache in it", "cgroup_peak_bytes"),
        ("peak of its anonymous memory", "cgroup_anon_peak_bytes"),
        ("peak of the process", "process_peak_bytes"),
    ):
        view.add_row(label, *(format_bytes(row[key]) if row.get(key) else "-" for row in summary["runs"]))
    report.out.print(view)
    for row in summary["runs"]:
        report.reached(
            f"T {row['temperature']:g}: {row['on_seconds_per_pass']:.2f} s a pass on, disk or processor "
            f"alone {row['ceiling_seconds_per_pass']:.2f}; {row['on_tokens_per_s']:.2f} tokens a s of "
            f"{row['ceiling_tokens_per_s']:.2f} that these tokens a pass allow",
            ratio(row["on_tokens_per_s"], row["ceiling_tokens_per_s"]),
        )
    report.note(NOTE)


def options(p: argparse.ArgumentParser) -> None:
    shared(
        p, "model", "factor", "target", "engine_memory", "off_tokens", "budget", "width", "context", "dtype"
    )
    shared(p, "temperatures", "seed", "keep_caches", "no_cgroup", draft_bits=4, memory="1.5GB", prompts=4)
    shared(p, tokens=48, raw_bytes="4GB")
    p.add_argument("--draft", help="default: the small model")
    p.add_argument("--rounds", type=int, default=2, help="the prompts are dealt into so many off-on pairs")
    p.add_argument("--check", action="store_true", help="decode on's whole answer again without speculation")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Build what is missing, measure and tell; short of its aim where tokens differ."""
    prompts = read_prompts(args.prompts)
    folder = widened(args)
    args.draft = args.draft or args.model
    recipe = read_recipe(folder)
    ceiling = find_ceiling(args, folder, recipe)
    show_ceiling(ceiling, report)
    liberties = tell_liberties(args, report)
    runs = measure(args, folder, recipe, prompts, report)
    keys = ("factor", "draft_bits", "dtype", "budget", "width", "context", "tokens", "off_tokens", "seed")
    summary = {
        **report.head(args, *keys),
        "model": folder.name,
        "draft": f"draft {model_name(args.draft)} in {args.draft_bits} bits",
        "memory_bytes": parse_bytes(args.memory),
        "liberties": liberties,
        "ceiling": ceiling.to_json(args.budget),
        "runs": [tally(runs, temperature, ceiling) for temperature in args.temperatures],
        "note": NOTE,
    }
    show(summary, report)
    report.record(summary, processes=runs)
    differing = sum(row["prompts_with_another_token"] for row in summary["runs"])
    if differing:
        report.missed(
            f"{differing} answers differ between off and on: see where with offspec generate --check"
        )
    return summary


main = Command("offload", "Speculation off and on, streamed.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

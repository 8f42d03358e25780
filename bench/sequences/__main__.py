"""Many answers from one trip of the weights: tokens a second in all by the number of sequences.

    python -m bench.sequences [--sequences 1 2 4 8 16] [--memory 2GB] [--peer]

Target: SmolLM2-135M-Instruct widened ×4, streamed from disk in a cgroup of that memory. The same prompts are
answered so many at a time, with a draft and without; one at a time is one after the other. The ceiling is
what the link gives and what the processor multiplies, whichever takes longer.
A plan predicts passes that all sequences share, prompts aside: beside it is what such passes took, and apart
those with prompts and those that fewer were left for. Plans are made anew, by the disk as it is now.
With --peer, transformers and accelerate answer as many prompts in one batch. Every answer must be the same at
any number of sequences.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import measured, tell_liberties
from bench.lib.record import keep
from bench.lib.report import Report, grid, model_name, ratio, read_prompts
from bench.lib.streamed import ask, layer_files, numbered, product_rates, raw_bandwidth, widened
from bench.peers import env as peers_env
from bench.peers.jobs import placements
from offspec.checkpoint.widen import RECIPE
from offspec.core.config import format_bytes, parse_bytes

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # of products whose rate is measured
_OF_A_PASS = (
    *(("passes", "d"), ("tokens_per_s", ".2f"), ("tokens", ".1f"), ("rows", ".0f"), ("steps", ".1f")),
    *(("seconds", ".2f"), ("draft", ".2f"), ("compute", ".2f"), ("GB/s", ".2f")),
)
_FASTER, _OF_ROOFLINE, _AT = 3.0, 0.85, 8  # what is aimed at, with so many sequences


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "seed", "keep_caches", "no_cgroup", "engine_memory", "dtype")
    shared(p, memory="2GB", tokens=64, off_tokens=6, context=512, draft_bits=4, raw_bytes="1GB")
    p.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16], metavar="N",
                   help="how many share passes (default 1 2 4 8 16)")  # fmt: skip
    p.add_argument("--answers", type=int, default=8, help="prompts, or as many as sequences (default 8)")
    p.add_argument("--peer", action="store_true", help="accelerate, too: as many prompts in one batch")
    p.add_argument("--peer-tokens", type=int, default=3, help="new tokens of its answers (default 3)")
    p.set_defaults(check=False, budget=None, width=None, temperature=0.0)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    folder = widened(args)
    recipe = json.loads((folder / RECIPE).read_text("utf-8"))
    rates = product_rates(json.loads((folder / "config.json").read_text("utf-8")), _ROWS, args.dtype)
    bandwidth = raw_bandwidth(args, layer_files(folder, recipe)).bytes_per_s
    report.ceiling(f"the disk gives {format_bytes(bandwidth)}/s")
    for together, rate in rates.items():
        seconds = 2 * recipe["matmul_parameters"] * together / rate
        report.ceiling(f"{together:4} rows are multiplied in {seconds:.2f} s, at {rate / 1e9:.0f} GFLOP/s")
    liberties = tell_liberties(args, report)
    rows, told = list[dict[str, Any]](), dict[str, list[Any]]()
    for count in args.sequences:
        prompts = list(enumerate(read_prompts(max(args.answers, count))))
        for on in (True, False):
            report.progress(f"{count} sequences, {'drafts' if on else 'no draft'}")
            asked = argparse.Namespace(**{**vars(args), "draft": args.model})
            found = ask(asked, folder, prompts, 0.0, on, "bench.sequences.worker", sequences=count)
            told.setdefault(f"{on}", []).append(found.pop("token_ids"))
            rows.append(figures(found, count, on, recipe, bandwidth, rates))
        if args.peer:
            report.progress(f"accelerate, a batch of {count}")
            rows.append(
                {"sequences": count, "way": "accelerate", **accelerate(args, folder, recipe, prompts[:count])}
            )
    show(rows, report)
    for answers in told.values():
        same = all(a == b for one in answers for a, b in zip(one, answers[0], strict=False))
        if not same:
            report.missed("answers differ with the number of sequences")
    short = shortfalls(rows)
    row = {
        "case": f"{folder.name} in {args.memory}",
        "order": [recipe["factor"]],
        "command": report.command,
        "liberties": liberties,
        "raw_bytes_per_s": bandwidth,
        "product_flops_per_s": rates,
        "draft": model_name(args.model),
        "rows": rows,
        "shortfalls": short,
    }
    for text in short:
        report.missed(text)
    keep(report, {}, row)
    return row


def figures(
    found: dict[str, Any],
    count: int,
    on: bool,
    recipe: dict[str, Any],
    bandwidth: float,
    rates: dict[int, float],
) -> dict[str, Any]:
    """What a process reached, and the share of what the link and the processor allow."""
    trips = ratio(found["streamed_bytes"], found["trip_bytes"])
    per_pass = ratio(found["nodes"], trips)
    rate = min(rates.items(), key=lambda known: abs(known[0] - per_pass))[1]
    link = found["streamed_bytes"] / bandwidth
    multiplied = found["nodes"] / rate + found["prompt_tokens"] / max(rates.values())
    products = 2 * recipe["matmul_parameters"] * multiplied
    return {
        "sequences": count,
        "way": "drafts" if on else "no draft",
        "tokens_per_s": ratio(found["tokens"], found["seconds"]),
        "tokens_per_trip": ratio(found["tokens"], trips),
        "rows_per_trip": per_pass,
        "link_seconds": link,
        "product_seconds": products,
        "of_roofline": ratio(max(link, products), found["seconds"]),
        "last_first_token_s": max(found["ttft_s"]),
        **{
            key: found.get(key)
            for key in (
                *("predicted", "passes_by_kind", "trip_bytes", "seconds", "tokens", "budget", "width"),
                *("load_seconds", "cgroup_peak_bytes"),
            )
        },
    }


def accelerate(
    args: argparse.Namespace, folder: Path, recipe: dict[str, Any], prompts: list[Any]
) -> dict[str, Any]:
    """transformers with accelerate's disk offload, all prompts in one batch."""
    place = placements(recipe, int(parse_bytes(args.memory) * 0.5))[0]
    job = {
        "peer": "accelerate", "target": str(folder), "placement": place, "temperature": 0.0,
        "max_tokens": args.peer_tokens, "seed": args.seed, "seconds": 900, "together": True,
        "prompts": numbered(prompts),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        argv = [str(peers_env.ensure()), "-I", str(peers_env.WORKER), json.dumps({**job, "scratch": scratch})]
        found = json.loads(measured(args, argv)[0])
    if "error" in found:
        return {"error": found["error"]["message"]}
    (answer,) = found["answers"]
    return {"tokens_per_s": ratio(answer["tokens"], answer["seconds"]), **answer}


def show(rows: list[dict[str, Any]], report: Report) -> None:
    heads = ("in all", "tokens a trip", "rows", "of roofline")
    view = grid("tokens a second in all, prompts and ends included", "sequences", "", *heads)
    for row in rows:
        keys = (("tokens_per_s", ".2f"), ("tokens_per_trip", ".1f"), ("rows_per_trip", ".0f"))
        view.add_row(str(row["sequences"]), row["way"], *_cells(row, *keys, ("of_roofline", ".2f")))
    report.out.print(view)
    parts = ("passes", "tok/s", "tokens", "rows", "steps", "seconds", "draft", "compute", "GB/s")
    view = grid("a pass, as predicted and as measured", "sequences", "", "", *parts)
    for row in rows:
        kinds, predicted = row.get("passes_by_kind") or {}, row.get("predicted")
        if predicted is not None:
            found = {
                "tokens_per_s": predicted["tok_per_s"],
                "tokens": predicted["tokens_per_pass"],
                "seconds": predicted["seconds_per_pass"],
                "draft": predicted["draft_seconds"],
                "compute": predicted["compute_seconds"],
                "GB/s": row["trip_bytes"] / predicted["link_seconds"] / 1e9,
            }
            kinds = {"predicted": found, **kinds}
        for kind, found in kinds.items():
            of_link = {"GB/s": found["bytes_per_s"] / 1e9} if "bytes_per_s" in found else {}
            view.add_row(str(row["sequences"]), row["way"], kind, *_cells({**found, **of_link}, *_OF_A_PASS))
    report.out.print(view)


def _cells(row: dict[str, Any], *keys: tuple[str, str]) -> list[str]:
    return [f"{row[key]:{form}}" if row.get(key) is not None else "" for key, form in keys]


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    """Where neither aim is reached."""
    known = {(row["sequences"], row["way"]): row for row in rows}
    one, many = known.get((1, "drafts")), known.get((_AT, "drafts"))
    if one is None or many is None:
        return []
    gain = many["tokens_per_s"] / one["tokens_per_s"]
    if gain >= _FASTER or many["of_roofline"] >= _OF_ROOFLINE:
        return []
    return [
        f"{_AT} sequences are {gain:.2f} times one after the other ({_FASTER:g} was the aim), at "
        f"{many['of_roofline']:.2f} of the roofline ({_OF_ROOFLINE:g})"
    ]


main = Command("sequences", "Many answers from one trip of the weights.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

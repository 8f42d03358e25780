"""Drafting while the target loads: off and on in turns in one engine, in a memory cgroup.

    python -m bench.ahead [--factor 4] [--memory 1.5GB] [--prompts 4] [--tokens 80]

Target: SmolLM2-135M-Instruct widened (`--factor 1`: as it is), its draft the small model in 4 bits. Each
prompt is answered both ways, which of them first in turns; tokens must be the same. The first pass of an
answer, which reads the prompt, is not counted. The ceiling is an answer of the same passes whose drafts take
no time. Where by the plan the draft does not go on ahead it is switched on all the same, to see what that
costs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from bench.lib.command import Command, shared
from bench.lib.process import measured_job, tell_liberties
from bench.lib.record import keep
from bench.lib.report import Report, grid, model_name, ratio, read_prompts
from bench.lib.streamed import numbered, widened

_HIDDEN, _FASTER = 0.8, 1.15  # aimed at where the link binds: share of the drafting, tokens a second
_SLOWER = 0.97  # of the speed without, where the plan switches it on and the link does not bind
_SUMS = ("tokens", "nodes", "steps", "draft", "target", "beside", "computed", "bytes")


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "factor", "target", "seed", "keep_caches", "no_cgroup", "engine_memory", "dtype")
    shared(p, memory="1.5GB", tokens=80, context=512, prompts=4, draft_bits=4)
    p.add_argument("--temperature", type=float, default=0.0, help="(default 0)")
    p.add_argument("--budget", type=int, help="nodes of a tree (default: the plan's)")
    p.set_defaults(width=None)


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    folder = args.model if args.factor == 1 else str(widened(args))
    settings = {key: getattr(args, key) for key in ("draft_bits", "dtype", "budget", "width", "context")}
    job = {
        "load": {
            "model": folder,
            "draft": "auto" if args.factor == 1 else args.model,
            "memory": args.engine_memory or args.memory,
            "device": "cpu",
            **settings,
        },
        "params": {"temperature": args.temperature, "max_tokens": args.tokens, "ignore_eos": True},
        "seed": args.seed,
        "prompts": numbered(list(enumerate(read_prompts(args.prompts)))),
    }
    found = measured_job(args, "bench.ahead.worker", job)
    off, on = (summed(found["answers"], ahead) for ahead in (False, True))
    case = compared(off, on)
    report.ceiling(
        f"{off['draft']:.2f} s of {off['draft'] + off['target']:.2f} s a pass are drafting: with all of it "
        f"hidden {case['most']:.2f} times the tokens a second"
    )
    liberties = tell_liberties(args, report)
    show(off, on, report)
    report.reached(f"{case['hidden']:.0%} of the drafting is hidden", case["hidden"])
    report.reached(
        f"{on['tok_per_s']:.2f} tok/s, {off['tok_per_s']:.2f} without: {case['faster']:.2f} times, and "
        f"{case['faster_alike']:.2f} with the target's time of both averaged",
        case["faster"] / case["most"],
    )
    report.note(f"by the plan the draft {'goes on ahead' if found['planned'] else 'waits'} here")
    if not same_answers(found["answers"]):
        report.missed("answers differ")
    for text in shortfalls(case, found["planned"]):
        report.missed(text)
    row = {
        "case": f"{model_name(folder)} in {args.memory}, T {args.temperature:g}",
        "order": [args.factor, args.memory, args.temperature],
        "command": report.command,
        "liberties": liberties,
        "off": off,
        "on": on,
        **case,
        **{key: value for key, value in found.items() if key != "answers"},
    }
    keep(report, {}, row)
    return row


def summed(answers: Sequence[dict[str, Any]], ahead: bool) -> dict[str, float]:
    """Of the answers one way: figures a pass, and tokens a second."""
    passes = [one for answer in answers if answer["ahead"] == ahead for one in answer["passes"]]
    figures = {key: ratio(sum(one[key] for one in passes), len(passes)) for key in _SUMS}
    speed = ratio(figures["tokens"], figures["draft"] + figures["target"])
    return {"passes": len(passes), **figures, "tok_per_s": speed}


def compared(off: dict[str, float], on: dict[str, float]) -> dict[str, float]:
    """Share of the drafting that is hidden, and how many times as fast.

    most: where all were. faster_alike: had the target taken the same time, whose disk is not always as fast.
    """
    target = (off["target"] + on["target"]) / 2
    alike = (ratio(one["tokens"], one["draft"] + target) for one in (on, off))
    return {
        "hidden": 1 - ratio(on["draft"], off["draft"]),
        "most": ratio(off["draft"] + off["target"], off["target"]),
        "faster": ratio(on["tok_per_s"], off["tok_per_s"]),
        "faster_alike": ratio(*alike),
    }


def same_answers(answers: Sequence[dict[str, Any]]) -> bool:
    """Whether each prompt has one answer."""
    said = {(answer["prompt"], tuple(answer["token_ids"])) for answer in answers}
    return len(said) == len({prompt for prompt, _ in said})


def shortfalls(case: dict[str, float], planned: bool) -> list[str]:
    """What was aimed at and is not reached, where the plan has the draft go on ahead."""
    if not planned:
        return []
    short = []
    if case["hidden"] < _HIDDEN:
        short.append(f"{case['hidden']:.0%} of the drafting is hidden ({_HIDDEN:.0%} was the aim)")
    if case["faster_alike"] < min(_FASTER, _SLOWER * case["most"]):
        short.append(f"{case['faster_alike']:.2f} times as fast ({_FASTER:g} was the aim)")
    return short


def show(off: dict[str, float], on: dict[str, float], report: Report) -> None:
    heads = ("passes", "tokens", "nodes", "steps", "drafting, s", "target, s", "computed, s", "beside, s")
    view = grid("figures a pass", "drafts", *heads)
    keys = ("passes", "tokens", "nodes", "steps", "draft", "target", "computed", "beside")
    for name, one in (("after", off), ("ahead", on)):
        view.add_row(name, *(f"{one[key]:.3g}" for key in keys))
    report.out.print(view)


main = Command("ahead", "Drafting while the target loads.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

"""Continuous batching: tokens per second by the number of concurrent sequences.

    python -m bench.sequences [--sequences 1 8] [--answers 8] [--memory 2GB]

The widened model streams, drafted by the small one in 4 bits. Every run answers the same prompts.
"""

from __future__ import annotations

import argparse
import sys
import time

from bench.lib.report import Report, ratio, read_prompts
from bench.lib.runner import (
    Figures,
    Job,
    Rows,
    comparison_bench,
    prepare_streamed,
    settings,
    streamed_options,
)
from offspec.core.config import SamplingParams

WANTED, _AT = 3.0, 8  # required speed-up over one sequence, at this number of sequences


def options(p: argparse.ArgumentParser) -> None:
    streamed_options(p, memory="2GB", tokens=64, context=512, draft_bits=4)
    p.add_argument("--sequences", type=int, nargs="+", default=[1, _AT], metavar="N", help="(default 1 8)")
    p.add_argument("--answers", type=int, default=8, help="prompts (default 8)")


def ways(args: argparse.Namespace, report: Report) -> dict[str, Job]:
    folder, files = prepare_streamed(args, report)
    draft = {"draft": args.model, "draft_bits": args.draft_bits, "context": args.context}
    job = {
        "load": settings(args, folder, **draft),
        "files": files,
        "prompts": [prompt.prompt for prompt in read_prompts(max(args.answers, *args.sequences))],
        "tokens": args.tokens,
        "seed": args.seed,
    }
    return {str(count): {**job, "sequences": count} for count in args.sequences}


def measure(job: Job) -> Figures:
    import offspec
    from offspec.core.events import Finished, PassStats

    with offspec.load(**job["load"], sequences=job["sequences"], replan=True) as engine:
        began, passes, results = time.perf_counter(), list[PassStats](), []
        answers = [
            engine.submit(text, SamplingParams(max_tokens=job["tokens"], seed=job["seed"] + number))
            for number, text in enumerate(job["prompts"])
        ]
        for each in answers:
            for event in each:
                if isinstance(event, PassStats):
                    passes.append(event)
                elif isinstance(event, Finished):
                    results.append(event.result)
        seconds, plan = time.perf_counter() - began, engine.plan
    tokens = sum(result.tokens for result in results)
    # Every answer with a tree in a pass reports the pass, with the same seconds.
    shared = {(one.draft_seconds, one.target_seconds): one for one in passes}
    return {
        "tokens_per_s": ratio(tokens, seconds),
        "predicted_tokens_per_s": plan.forecast.tok_per_s if plan else 0.0,
        "tokens_per_pass": ratio(tokens, len(shared)),
        "draft_seconds": ratio(sum(one.draft_seconds for one in shared.values()), len(shared)),
        "target_seconds": ratio(sum(one.target_seconds for one in shared.values()), len(shared)),
        "token_ids": [result.token_ids for result in results],
    }


def shortfalls(rows: Rows, args: argparse.Namespace) -> list[str]:
    if not {"1", str(_AT)} <= rows.keys():
        return []
    gain = ratio(rows[str(_AT)]["tokens_per_s"], rows["1"]["tokens_per_s"])
    return [f"{_AT} sequences are {gain:.2f} times one, less than {WANTED}"] if gain < WANTED else []


_COLUMNS = ("tokens_per_s", "predicted_tokens_per_s", "tokens_per_pass", "draft_seconds", "target_seconds")
main = comparison_bench(
    "sequences", "Continuous batching.", options, ways, dict.fromkeys(_COLUMNS, ".2f"), shortfalls
)

if __name__ == "__main__":
    sys.exit(main())

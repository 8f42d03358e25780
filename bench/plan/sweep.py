"""The budget and width that a plan chooses, beside a sweep over both on real answers.

    python -m bench.plan.sweep [--factor 4 --memory 1.5GB] [--budgets 16 64 256 1024] [--widths 4 16 64]

The target is placed as the plan says, with room for the largest tree besides. Every round takes a prompt, and
all pairs of budget and width answer it in random order, with the plan's own way between them several times:
where disk or processor are shared, a drift hits all alike. All start behind the same prompt, which the caches
keep, and are timed over whole passes until enough tokens have come. Pairs that were far behind are left out
of the rounds after the first.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from bench.lib.cgroup import BenchError
from bench.lib.command import Command, shared
from bench.lib.plots import sweep_plot
from bench.lib.record import keep
from bench.lib.report import Prompt, Report, model_name, read_prompts
from bench.plan.cases import Target
from bench.plan.sweep_figures import Answer, Pair, show, show_ceiling, summarise
from offspec.core.config import SamplingParams, parse_bytes
from offspec.core.events import PassStats, unheard
from offspec.plan.records import DraftRecord

if TYPE_CHECKING:
    from offspec.engine.engine import Engine
    from offspec.plan.policy import DraftPolicy
    from offspec_planners.plan import Plan

WANTED = 0.95
BUDGETS = (16, 32, 64, 128, 256, 512, 1024)
WIDTHS = (4, 8, 16, 32, 64)
_DEEPEST = 400  # levels of a tree, which the limit of tokens must leave room for


class Unkept(DraftRecord):
    """What is known of a draft, to learn into for once: no later plan should know these prompts."""

    def save(self) -> None:
        """Nothing is kept."""


def load(plan: Plan, args: argparse.Namespace, target: Target) -> tuple[Engine, DraftPolicy]:
    """An engine placed by the plan, with room for every tree of the sweep, and the plan's policy for it."""
    from offspec.engine.engine import Engine
    from offspec.plan.fit import Fit
    from offspec.plan.load import load_models, open_models
    from offspec.plan.policy import DraftPolicy

    if plan.draft_mode == "none":
        raise BenchError("a draft has no room in this memory: give more --memory")
    most = max(*args.budgets, plan.budget), max(*args.widths, plan.width)
    opened = open_models(target.config(parse_bytes(args.memory), args.temperature), unheard)
    config = replace(opened.config, budget=most[0], width=most[1], context=plan.context)
    fit = Fit.of_plan(plan)
    assembly = load_models(opened, config, fit, unheard)
    record = Unkept(opened.target_print, opened.draft_print, fit.draft_bits)
    policy = replace(DraftPolicy.planned(plan, config, record), record=0)
    return Engine(config, assembly, unheard, policy=policy, record=record), policy


def answer(engine: Engine, prompt: str, params: SamplingParams, tokens: int) -> tuple[int, int, float]:
    """Tokens, passes and seconds of the beginning of an answer: whole passes, until so many tokens came."""
    began, found, passes = time.perf_counter(), 0, 0
    events = engine.stream(prompt, params)
    try:
        for event in events:
            if isinstance(event, PassStats):
                found, passes = found + event.emitted, passes + 1
                if found >= tokens:
                    break
        return found, passes, time.perf_counter() - began
    finally:
        events.close()


def order(pairs: Sequence[Pair], repeats: int, chance: random.Random) -> list[Pair | None]:
    """All pairs in random order, with the plan's policy, None, first, last and evenly between."""
    shuffled: list[Pair | None] = list(chance.sample(list(pairs), len(pairs)))
    places = [round(turn * len(shuffled) / max(repeats - 1, 1)) for turn in range(repeats)]
    for place in reversed(places):
        shuffled.insert(place, None)
    return shuffled


def measure(
    engine: Engine, planned: DraftPolicy, args: argparse.Namespace, prompts: Sequence[Prompt], report: Report
) -> list[Answer]:
    """Rounds over the prompts, as many as there is time for; the first two in any case."""
    from offspec.draft.grow.best_first import GrowthPolicy
    from offspec.plan.policy import DraftPolicy

    pairs = [(budget, width) for budget in args.budgets for width in args.widths if width <= budget]
    chance, answers, began = random.Random(args.seed), list[Answer](), time.perf_counter()
    for turn, prompt in enumerate(prompts):
        if turn >= 2 and time.perf_counter() - began > 60 * args.minutes:
            break
        most = args.tokens + _DEEPEST
        params = SamplingParams(args.temperature, seed=args.seed + turn, max_tokens=most, ignore_eos=True)
        engine.follow(planned)
        answer(engine, prompt.prompt, params, 1)  # carries the prompt
        for pair in order(pairs, args.repeats, chance):
            engine.follow(planned if pair is None else DraftPolicy(GrowthPolicy(*pair)))
            answers.append(Answer(turn, pair, *answer(engine, prompt.prompt, params, args.tokens)))
        summary = summarise(answers)
        report.progress(
            f"round {turn + 1}, {prompt.id}: {len(pairs)} pairs, {time.perf_counter() - began:.0f} s, chosen "
            f"over best {summary['of_best']:.2f}"
        )
        if turn == 0:
            enough = args.keep * summary["best"]["tok_per_s"]
            behind = {(c["budget"], c["width"]) for c in summary["cells"] if c["tok_per_s"] < enough}
            pairs = [pair for pair in pairs if pair not in behind]
    return answers


def options(p: argparse.ArgumentParser) -> None:
    shared(p, "model", "seed", factor=1, memory="1.5GB", prompts=6, tokens=48)
    p.add_argument("--temperature", type=float, default=0.0)
    p.add_argument("--replan", action="store_true", help="measure and plan anew, whatever plan is kept")
    p.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    p.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    p.add_argument("--minutes", type=float, default=5.0, help="no third or later round begins after these")
    p.add_argument("--repeats", type=int, default=4, help="of the plan's own way in a round (default 4)")
    p.add_argument("--keep", type=float, default=0.75, metavar="SHARE",
                   help="of the first round's best that later rounds ask for (default 0.75)")  # fmt: skip


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Plan, sweep and tell; short of its aim where the plan is too slow."""
    from offspec.engine.rehearsal import make_plan

    prompts, target = read_prompts(args.prompts), Target.widened(args.model, args.factor)
    config = target.config(parse_bytes(args.memory), args.temperature)
    report.progress("planning")
    plan = make_plan(config, replan=args.replan)
    show_ceiling(plan, report)
    engine, planned = load(plan, args, target)
    with engine:
        answers = measure(engine, planned, args, prompts, report)
    keys = ("factor", "temperature", "tokens", "repeats", "keep", "seed")
    case = {
        "case": f"x{args.factor}:{args.memory}:{args.temperature:g}",
        "order": [args.factor, args.temperature, parse_bytes(args.memory)],
        "model": model_name(target.model),
        "memory_bytes": plan.memory,
        **{key: getattr(args, key) for key in keys},
        "plan": {"budget": plan.budget, "width": plan.width, "acceptance": plan.acceptance},
        **summarise(answers),
        "command": report.command,
    }
    show(case, report)
    raw = [asdict(found) for found in answers]
    record = keep(report, {"wanted": WANTED}, {**case, "answers": raw})
    report.note(sweep_plot(record["cases"], report.file(suffix=".svg")))
    report.exit_code = int(case["of_best"] < WANTED)
    return case


main = Command(
    "plan_sweep", "The chosen budget and width against a sweep.", options, bench, module="plan.sweep"
)

if __name__ == "__main__":
    sys.exit(main())

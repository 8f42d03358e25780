"""Tokens per pass on the prompt set: tokens generated per read of the target's weights.

    python -m bench.acceptance [MODEL] [--prompts N] [--temperatures 0 1.0] [--verify coupled plain]

An answer ends at its end-of-text token, as it does for a user, and all its tokens are counted. Two means are
printed: total tokens over total passes (the cost on the transfer link), and the mean of the prompts' ratios.
At temperature 0 both verification methods pick the same tokens in the same tree, so greedy runs are shared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.lib.command import MODEL, Command, shared
from bench.lib.drafting import always_drafting
from bench.lib.report import Prompt, Report, model_name, ratio, read_prompts
from offspec.core.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one prompt. gaps: logit gaps (nats) at which `--check` found another token."""

    id: str
    kind: str
    verify: str
    temperature: float
    tokens: int
    passes: int
    seconds: float
    finish_reason: str
    draft: str
    gaps: tuple[float, ...] | None

    @property
    def tokens_per_pass(self) -> float:
        return ratio(self.tokens, self.passes)


def tokens_per_pass_stats(answers: Iterable[Answer]) -> dict[str, float]:
    """Return tokens per pass of some answers: `pooled` = all tokens / all passes, `mean` = over prompts."""
    group = list(answers)
    tokens, passes = sum(a.tokens for a in group), sum(a.passes for a in group)
    mean = ratio(sum(a.tokens_per_pass for a in group), len(group))
    pooled = ratio(tokens, passes)
    return {"answers": len(group), "tokens": tokens, "passes": passes, "pooled": pooled, "mean": mean}


def settings(args: argparse.Namespace) -> list[tuple[str, float]]:
    """Return (verify, temperature) of every run; greedy runs use the first verification method."""
    return [
        (verify, temperature)
        for turn, verify in enumerate(args.verify)
        for temperature in args.temperatures
        if temperature > 0 or turn == 0
    ]


def measure(args: argparse.Namespace, prompts: Sequence[Prompt], report: Report) -> list[Answer]:
    """Answer every prompt with every setting; each verification method has an engine of its own."""
    import offspec

    names = ("draft", "draft_bits", "memory", "device", "dtype", "budget", "width")
    load = {name: getattr(args, name) for name in names}
    answers: list[Answer] = []
    for verify in args.verify:
        temperatures = [t for v, t in settings(args) if v == verify]
        if not temperatures:
            continue
        with always_drafting(offspec.load(args.model, verify=verify, **load)) as engine:
            for temperature in temperatures:
                for number, prompt in enumerate(prompts):
                    seed = args.seed + number  # new noise per prompt, so one lucky draw does not dominate
                    params = SamplingParams(
                        temperature, seed=seed, max_tokens=args.tokens, ignore_eos=args.ignore_eos
                    )
                    result = engine.generate(prompt.prompt, params, check=args.check)
                    misses = result.mismatches
                    answer = Answer(
                        prompt.id, prompt.kind, verify, temperature, result.tokens, result.passes,
                        result.seconds, result.finish_reason, result.draft,
                        None if misses is None else tuple(miss.gap for miss in misses),
                    )  # fmt: skip
                    answers.append(answer)
                    report.progress(
                        f"{verify} T {temperature:g}  {prompt.id:<12} {answer.tokens} tokens in "
                        f"{answer.passes} passes, {answer.tokens_per_pass:.2f}/pass, {answer.seconds:.1f} s"
                    )
    return answers


def summarize(args: argparse.Namespace, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the object of the last line, computed from the answers alone."""
    runs = []
    for verify, temperature in settings(args):
        group = [a for a in answers if (a.verify, a.temperature) == (verify, temperature)]
        kinds = list(dict.fromkeys(a.kind for a in group))
        run: dict[str, Any] = {
            "verify": verify,
            "temperature": temperature,
            **tokens_per_pass_stats(group),
            "tokens_per_s": ratio(sum(a.tokens for a in group), sum(a.seconds for a in group)),
            "kinds": {kind: tokens_per_pass_stats(a for a in group if a.kind == kind) for kind in kinds},
        }
        if args.check:
            gaps = [gap for a in group for gap in a.gaps or ()]
            parted = sum(bool(a.gaps) for a in group)
            run["check"] = {"prompts": len(group), "prompts_with_mismatch": parted, "gaps": gaps}
        runs.append(run)
    greedy = next((run for run in runs if run["temperature"] == 0), None)
    if greedy is not None:
        for run in runs:
            run["share_of_greedy"] = ratio(run["pooled"], greedy["pooled"])
            run["mean_share_of_greedy"] = ratio(run["mean"], greedy["mean"])
    prompts = len({a.id for a in answers})
    return {"model": model_name(args.model), "draft": answers[0].draft, "prompts": prompts, "runs": runs}


def show(args: argparse.Namespace, summary: dict[str, Any], report: Report) -> None:
    """Print a table. Rows: kinds, then all prompts. Columns: verification methods and temperatures."""
    runs = summary["runs"]
    title = f"tokens per pass, {summary['model']}, draft {summary['draft']}, budget {args.budget}"
    rows = []
    for kind in dict.fromkeys(kind for run in runs for kind in run["kinds"]):
        cells = [run["kinds"].get(kind) for run in runs]
        rows.append([kind, *(f"{cell['pooled']:.2f}" if cell else "" for cell in cells)])
    for label, key, form in (
        ("all tokens / all passes", "pooled", ".2f"),
        ("mean over prompts", "mean", ".2f"),
        ("tokens", "tokens", "d"),
        ("share of greedy", "share_of_greedy", ".3f"),
        ("share of greedy, of the means", "mean_share_of_greedy", ".3f"),
    ):
        if key in runs[0]:
            rows.append([label, *(f"{run[key]:{form}}" for run in runs)])
    if args.check:
        checks = (run["check"] for run in runs)
        mismatches = (f"{check['prompts_with_mismatch']} of {check['prompts']}" for check in checks)
        rows.append(["prompts with another token", *mismatches])
    report.table(title, ("kind", *(f"{run['verify']} T {run['temperature']:g}" for run in runs)), rows)


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "prompts", "tokens", "budget", "width", "temperatures", "draft_bits", "dtype", "memory")
    shared(p, "device", "seed")
    p.add_argument("--verify", nargs="+", choices=("coupled", "plain"), default=["coupled", "plain"])
    p.add_argument("--draft", default="self", help="as in `offspec generate` (default self)")
    p.add_argument("--ignore-eos", action="store_true", help="continue past the end-of-text token")
    p.add_argument("--check", action="store_true", help="decode again without speculation and compare")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Answer all prompts and report."""
    most = min(args.budget, args.tokens)
    prompts = read_prompts(args.prompts)
    report.ceiling(f"{most} tokens per pass: the smaller of the tree's nodes and the answer's tokens")
    answers = measure(args, prompts, report)
    known = report.head(args, "dtype", "tokens", "budget", "width", "seed", "ignore_eos")
    summary = {**known, **summarize(args, answers)}
    best = max(run["pooled"] for run in summary["runs"])
    report.reached(f"{best:.2f} tokens per pass at best", ratio(best, most))
    show(args, summary, report)
    report.record(summary, device=args.device, answers=[asdict(answer) for answer in answers])
    return summary


main = Command("acceptance", "Tokens per pass on the prompt set.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

"""Tokens per pass on the prompt set: how many tokens one trip of the target's weights yields.

    python -m bench.acceptance [MODEL] [--prompts N] [--temperatures 0 1.0] [--verify coupled plain]

An answer ends at its end-of-text token as it does for a user, and counts the tokens it has. Two means are
given: all tokens over all passes (what a user's link pays), and the mean over prompts of each one's own.
At temperature 0 both walks pick the same tokens in the same tree, so greedy runs are done once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from bench.lib.command import MODEL, Command, shared
from bench.lib.drafting import always_drafting
from bench.lib.report import Prompt, Report, grid, model_name, ratio, read_prompts
from offspec.core.config import SamplingParams


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt answered: `gaps` are the logit gaps (nats) where `--check` found another token."""

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


@dataclass(frozen=True, slots=True)
class Yield:
    """Tokens per pass over some answers: `pooled` = all tokens / all passes, `mean` = over prompts."""

    answers: int
    tokens: int
    passes: int
    pooled: float
    mean: float


def yield_of(answers: Iterable[Answer]) -> Yield:
    """The two means of a set of answers."""
    group = list(answers)
    tokens, passes = sum(a.tokens for a in group), sum(a.passes for a in group)
    mean = ratio(sum(a.tokens_per_pass for a in group), len(group))
    return Yield(len(group), tokens, passes, ratio(tokens, passes), mean)


def settings(args: argparse.Namespace) -> list[tuple[str, float]]:
    """(verify, temperature) of every run; a greedy run belongs to the first walk unless asked for twice."""
    return [
        (verify, temperature)
        for turn, verify in enumerate(args.verify)
        for temperature in args.temperatures
        if temperature > 0 or turn == 0 or args.greedy_each
    ]


def opened(args: argparse.Namespace, **settings: Any) -> Any:
    """An engine as the options and these settings say."""
    import offspec

    names = {"draft", "draft_bits", "memory", "device", "dtype", "budget", "width"} - settings.keys()
    given = {name: getattr(args, name) for name in names}
    return always_drafting(offspec.load(args.model, **given, **settings))


def measure(args: argparse.Namespace, prompts: Sequence[Prompt], report: Report) -> list[Answer]:
    """Answer every prompt under every setting; each walk has an engine of its own."""
    answers: list[Answer] = []
    for verify in args.verify:
        temperatures = [t for v, t in settings(args) if v == verify]
        if not temperatures:
            continue
        with opened(args, verify=verify) as engine:
            for temperature in temperatures:
                for number, prompt in enumerate(prompts):
                    seed = args.seed + number  # another noise for each, so that one lucky draw does not rule
                    params = SamplingParams(
                        temperature, seed=seed, max_tokens=args.tokens, ignore_eos=args.ignore_eos
                    )
                    answer = ask(engine, prompt, params, verify, check=args.check)
                    answers.append(answer)
                    report.progress(
                        f"{verify} T {temperature:g}  {prompt.id:<12} {answer.tokens} tokens in "
                        f"{answer.passes} passes, {answer.tokens_per_pass:.2f} a pass, {answer.seconds:.1f} s"
                    )
    return answers


def ask(
    engine: Any, prompt: Prompt, params: SamplingParams, verify: str = "coupled", *, check: bool = False
) -> Answer:
    """One prompt's answer."""
    result = engine.generate(prompt.prompt, params, check=check)
    gaps = None if result.mismatches is None else tuple(miss.gap for miss in result.mismatches)
    counts = (result.tokens, result.passes, result.seconds)
    return Answer(
        prompt.id, prompt.kind, verify, params.temperature, *counts, result.finish_reason, result.draft, gaps
    )


def summarise(args: argparse.Namespace, answers: Sequence[Answer]) -> dict[str, Any]:
    """Everything the last line says, from the answers alone."""
    runs = []
    for verify, temperature in settings(args):
        group = [a for a in answers if (a.verify, a.temperature) == (verify, temperature)]
        kinds = list(dict.fromkeys(a.kind for a in group))
        run: dict[str, Any] = {
            "verify": verify,
            "temperature": temperature,
            **asdict(yield_of(group)),
            "tokens_per_s": ratio(sum(a.tokens for a in group), sum(a.seconds for a in group)),
            "kinds": {kind: asdict(yield_of(a for a in group if a.kind == kind)) for kind in kinds},
        }
        if args.check:
            gaps = [gap for a in group for gap in a.gaps or ()]
            run["check"] = {
                "prompts": len(group),
                "prompts_with_mismatch": sum(bool(a.gaps) for a in group),
                "gaps": gaps,
            }
        runs.append(run)
    greedy = next((run for run in runs if run["temperature"] == 0), None)
    if greedy is not None:
        for run in runs:
            run["share_of_greedy"] = ratio(run["pooled"], greedy["pooled"])
            run["mean_share_of_greedy"] = ratio(run["mean"], greedy["mean"])
    return {
        "model": model_name(args.model),
        "draft": answers[0].draft,
        "prompts": len({a.id for a in answers}),
        "runs": runs,
    }


def table(args: argparse.Namespace, summary: dict[str, Any]) -> Table:
    """Rows: kinds, then all prompts. Columns: one for each walk and temperature."""
    title = f"tokens per pass, {summary['model']}, draft {summary['draft']}, budget {args.budget}"
    view = grid(title, "kind", *(f"{run['verify']} T {run['temperature']:g}" for run in summary["runs"]))
    kinds = list(dict.fromkeys(kind for run in summary["runs"] for kind in run["kinds"]))
    for kind in kinds:
        cells = [run["kinds"].get(kind) for run in summary["runs"]]
        view.add_row(kind, *(f"{cell['pooled']:.2f}" if cell else "" for cell in cells))
    view.add_section()
    view.add_row("all tokens / all passes", *(f"{run['pooled']:.2f}" for run in summary["runs"]))
    view.add_row("mean over prompts", *(f"{run['mean']:.2f}" for run in summary["runs"]))
    view.add_row("tokens", *(str(run["tokens"]) for run in summary["runs"]))
    if "share_of_greedy" in summary["runs"][0]:
        for label, key in (("share of greedy", ""), ("share of greedy, of the means", "mean_")):
            view.add_row(label, *(f"{run[key + 'share_of_greedy']:.3f}" for run in summary["runs"]))
    if args.check:
        checks = (run["check"] for run in summary["runs"])
        view.add_row(
            "prompts with another token", *(f"{c['prompts_with_mismatch']} of {c['prompts']}" for c in checks)
        )
    return view


def options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", **MODEL)
    shared(p, "prompts", "tokens", "budget", "width", "temperatures", "draft_bits", "dtype", "memory")
    shared(p, "device", "seed")
    p.add_argument("--verify", nargs="+", choices=("coupled", "plain"), default=["coupled", "plain"])
    p.add_argument("--greedy-each", action="store_true", help="run temperature 0 under every walk")
    p.add_argument("--draft", default="substitute", help="as `offspec generate` has it (default substitute)")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-text token")
    p.add_argument("--check", action="store_true", help="decode again without speculation and compare")


def bench(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Answer all prompts and tell."""
    most = min(args.budget, args.tokens)
    prompts = read_prompts(args.prompts)
    report.ceiling(f"{most} tokens a pass: the smaller of the tree's nodes and the answer's tokens")
    answers = measure(args, prompts, report)
    settings = report.head(args, "dtype", "tokens", "budget", "width", "seed", "ignore_eos")
    summary = {**settings, **summarise(args, answers)}
    best = max(run["pooled"] for run in summary["runs"])
    report.reached(f"{best:.2f} tokens a pass at best", ratio(best, most))
    report.out.print(table(args, summary))
    report.record(summary, device=args.device, answers=[asdict(answer) for answer in answers])
    return summary


main = Command("acceptance", "Tokens per pass on the prompt set.", options, bench)

if __name__ == "__main__":
    sys.exit(main())

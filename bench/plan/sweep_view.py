"""How the sweep is told: what a pass must cost, a table of all pairs, and the plan's share of the best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.lib.report import Report, grid

if TYPE_CHECKING:
    from offspec_planners.plan import Plan


def show_ceiling(plan: Plan, report: Report) -> None:
    """What the plan chose, and what its passes cost without a draft."""
    for rows in sorted({1, plan.budget, 1024}):
        seconds = float(plan.costs.iteration(0.0, rows))
        report.ceiling(f"{seconds:.3g} s a pass of {rows} tokens, by what was measured for the plan")
    report.note(
        f"the plan: budget {plan.budget}, width {plan.width}, {plan.forecast.tok_per_s:.3g} tok/s foreseen, "
        f"acceptance {plan.acceptance}"
    )


def show(case: dict[str, Any], report: Report) -> None:
    """Tokens a second by budget and width; pairs that later rounds left out are in brackets."""
    cells = {(cell["budget"], cell["width"]): cell for cell in case["cells"]}
    widths = sorted({width for _, width in cells})
    title = f"{case['case']}: tok/s by budget and width, {case['rounds']} prompts"
    view = grid(title, "budget", *map(str, widths))
    for budget in sorted({budget for budget, _ in cells}):
        view.add_row(str(budget), *(_told(cells.get((budget, width)), case["rounds"]) for width in widths))
    report.out.print(view)
    chosen, best = case["chosen"], case["best"]
    report.reached(
        f"{chosen['tok_per_s']:.3g} tok/s by the plan ({chosen['tokens_per_pass']:.3g} tokens in "
        f"{chosen['seconds_per_pass']:.3g} s), {best['tok_per_s']:.3g} by the best pair, budget "
        f"{best['budget']} and width {best['width']}",
        case["of_best"],
    )
    report.reached("of the mean of the best three pairs", case["of_top_three"])
    report.note(f"answers of the plan's own way to one prompt lie {case['noise']:.0%} apart")


def _told(cell: dict[str, Any] | None, rounds: int) -> str:
    if cell is None:
        return ""
    text = f"{cell['tok_per_s']:.3g}"
    return text if cell["rounds"] == rounds else f"({text})"

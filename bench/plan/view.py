"""How the bench of plans is told: ceilings, a line for each case, and a table of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.lib.report import Report, grid, ratio
from offspec.core.config import format_bytes


def show_ceiling(factor: int, ceiling: dict[str, Any], report: Report) -> None:
    """What disk and processor give for a target, before any case is run."""
    rates = ", ".join(f"{rate / 1e9:.0f} at {rows}" for rows, rate in ceiling["gemm_flops_per_s"].items())
    report.ceiling(
        f"x{factor}: disk {format_bytes(ceiling['raw_bytes_per_s'])}/s, products GFLOP/s by rows: {rates}"
    )


def show_case(case: dict[str, Any], report: Report) -> None:
    """A line for the pass and one for the speed; the ratio is predicted over measured, and 1 is wanted."""
    if "error" in case:
        report.note(f"{case['case']}: {case['error']}")
        return
    link = ratio(case["plan"]["disk_bytes"], case["raw_bytes_per_s"])
    for key, unit, besides in (
        ("seconds_per_pass", "s a pass", f", {link:.2f} of the disk alone"),
        ("tok_per_s", "tok/s", ""),
    ):
        figure = case[key]
        report.reached(
            f"{case['case']}: {figure['measured']:.3g} {unit}{besides}, {figure['predicted']:.3g} predicted",
            ratio(figure["predicted"], figure["measured"]),
        )


def show(cases: Sequence[dict[str, Any]], report: Report) -> None:
    """All cases of the record, medians over prompts."""
    heads = ("memory", "budget, width", "s a pass", "off by", "tok/s", "off by", "tokens a pass", "stalled")
    view = grid("predicted / measured, medians over prompts", "case", *heads)
    for case in cases:
        if "error" in case:
            view.add_row(case["case"], "failed")
            continue
        cells = [format_bytes(case["memory_bytes"]), f"{case['plan']['budget']}, {case['plan']['width']}"]
        for key in ("seconds_per_pass", "tok_per_s"):
            missed = " !" if key in case["missed"] else ""
            cells += [_pair(case[key]), f"{case[key]['error']:.1%}{missed}"]
        view.add_row(
            case["case"], *cells, _pair(case["tokens_per_pass"]), f"{case['stalled']}/{len(case['rows'])}"
        )
    report.out.print(view)


def _pair(figure: dict[str, float]) -> str:
    return f"{figure['predicted']:.3g} / {figure['measured']:.3g}"

"""What-ifs of a plan, checked by applying them: predicted and measured speed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.report import Report
from offspec.core.values import parse_bytes

LIMIT = 0.2  # maximum relative error of a median over prompts

Validate = Callable[[int, Sequence[str]], tuple[dict[str, Any], Any]]  # see `bench.plan.validate`
Trial = tuple[tuple[str, ...], int | None]  # options, and a different memory limit in bytes


def trial_of(what_if: dict[str, Any]) -> Trial | None:
    """Return how to apply a what-if here; None if it needs another machine or several sequences."""
    change, note = what_if["change"], what_if["note"]
    if change == "no draft":
        return ("--draft", "none"), None
    if change.endswith(" of RAM"):
        return (), parse_bytes(change.removesuffix(" of RAM").replace(" ", ""))
    option = re.match(r"`(--(?:quantize|kv-cache|draft-bits) \w+)`", note)
    return (tuple(option[1].split()), None) if option else None


def check(
    plan: dict[str, Any], memory: int, validate: Validate, report: Report
) -> tuple[list[dict[str, Any]], bool]:
    """Apply the applicable what-ifs of a plan; return their speeds, and whether all are close enough."""
    rows = list[dict[str, Any]]()
    for what_if in plan["what_ifs"]:
        trial = trial_of(what_if)
        if trial is None:
            report.note(f"{what_if['change']}: cannot be applied on this machine")
            continue
        words, other = trial
        row = {"change": what_if["change"], "predicted": what_if["tok_per_s"]}
        report.progress(f"what if: {what_if['change']}")
        try:
            reached = validate(other or memory, words)[0]["tok_per_s"]["measured"]
            row |= {"measured": reached, "off": abs(what_if["tok_per_s"] / reached - 1)}
        except BenchError as error:
            row["error"] = str(error)
        rows.append(row)
    report.table("what-ifs: tok/s", ("change", "predicted", "measured", "error"), map(_cells, rows))
    return rows, all(row.get("off", 1.0) <= LIMIT for row in rows)


def _cells(row: dict[str, Any]) -> list[str]:
    cells = [row["change"], f"{row['predicted']:.3g}"]
    if "error" in row:
        return [*cells, "failed"]
    return [*cells, f"{row['measured']:.3g}", f"{row['off']:.0%}{' !' if row['off'] > LIMIT else ''}"]

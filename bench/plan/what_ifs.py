"""The what-ifs of a plan, each checked by doing it: the speed that was told beside that which is reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.report import Report
from offspec.core.values import parse_bytes

LIMIT = 0.2  # the most that a median over prompts may be off

Validate = Callable[[int, Sequence[str]], tuple[dict[str, Any], Any]]  # see `bench.plan.validate`
Trial = tuple[tuple[str, ...], int | None]  # options, and another memory limit in bytes


def trial_of(what_if: dict[str, Any]) -> Trial | None:
    """How a what-if is done on this machine; None where it takes another one, or several sequences."""
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
    """Do every what-if of a plan that can be done: what was told and reached; whether all are near enough."""
    rows = list[dict[str, Any]]()
    for what_if in plan["what_ifs"]:
        trial = trial_of(what_if)
        if trial is None:
            report.note(f"{what_if['change']}: cannot be done here")
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
    report.table("what-ifs: tok/s", ("change", "predicted", "measured", "off by"), map(_cells, rows))
    return rows, all(row.get("off", 1.0) <= LIMIT for row in rows)


def _cells(row: dict[str, Any]) -> list[str]:
    told = [row["change"], f"{row['predicted']:.3g}"]
    if "error" in row:
        return [*told, "failed"]
    return [*told, f"{row['measured']:.3g}", f"{row['off']:.0%}{' !' if row['off'] > LIMIT else ''}"]

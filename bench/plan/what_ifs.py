"""The what-ifs of a plan, each checked by doing it: the speed that was told beside that which is reached."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.lib.cgroup import BenchError
from bench.lib.report import Report, grid
from offspec.core.config import parse_bytes

LIMIT = 0.2  # the most that a median over prompts may be off

Validate = Callable[[int, Sequence[str]], tuple[dict[str, Any], Any]]  # see `bench.plan.validate`


@dataclass(frozen=True, slots=True)
class Trial:
    """How a what-if is done: with other options, or with other memory."""

    words: tuple[str, ...] = ()
    memory: int | None = None


def trial_of(what_if: dict[str, Any]) -> Trial | None:
    """How a what-if is done on this machine; None where it takes another one, or several sequences."""
    change, note = what_if["change"], what_if["note"]
    if change == "no draft":
        return Trial(("--draft", "none"))
    if change.endswith(" of RAM"):
        return Trial(memory=parse_bytes(change.removesuffix(" of RAM").replace(" ", "")))
    option = re.match(r"`(--(?:quantize|kv-cache|draft-bits) \w+)`", note)
    return Trial(tuple(option[1].split())) if option else None


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
        row = {"change": what_if["change"], "predicted": what_if["tok_per_s"]}
        report.progress(f"what if: {what_if['change']}")
        try:
            found, _ = validate(trial.memory or memory, trial.words)
        except BenchError as error:
            rows.append({**row, "error": str(error)})
            continue
        reached = found["tok_per_s"]["measured"]
        rows.append({**row, "measured": reached, "off": abs(what_if["tok_per_s"] / reached - 1)})
    _show(rows, report)
    return rows, all(row.get("off", 1.0) <= LIMIT for row in rows)


def _show(rows: Sequence[dict[str, Any]], report: Report) -> None:
    view = grid("what-ifs: tok/s", "change", "predicted", "measured", "off by")
    for row in rows:
        if "error" in row:
            view.add_row(row["change"], f"{row['predicted']:.3g}", "failed", "")
        else:
            off = f"{row['off']:.0%}{' !' if row['off'] > LIMIT else ''}"
            view.add_row(row["change"], f"{row['predicted']:.3g}", f"{row['measured']:.3g}", off)
    report.out.print(view)

"""A record that grows case by case: what is measured again takes the place of what was measured before."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from bench.lib.report import Report, environment

Case = dict[str, Any]  # with its name under "case", and under "order" the key it is sorted by


def earlier(report: Report) -> list[Case]:
    """The cases of earlier runs, unless they were made on another machine or with other versions."""
    try:
        found = json.loads(report.file().read_text("utf-8"))
        same = found["bench"] == report.name and found["environment"] == environment()
        return list(found["cases"]) if same else []
    except (OSError, ValueError, LookupError, TypeError):
        return []


def merged(older: Iterable[Case], newer: Case) -> list[Case]:
    """All cases in their order, each as it was measured last."""
    cases = {case["case"]: case for case in (*older, newer)}
    return sorted(cases.values(), key=lambda case: list(case["order"]))


def keep(report: Report, about: dict[str, Any], newer: Case) -> dict[str, Any]:
    """Write the record with this case in it, and return it. about: what the record says besides."""
    cases = merged(earlier(report), newer)
    record = {"bench": report.name, **about, "environment": environment(), "cases": cases}
    report.write(record)
    return record

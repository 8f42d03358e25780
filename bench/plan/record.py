"""A record that grows case by case: what is measured again takes the place of what was measured before."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.lib.report import RESULTS, environment, write_result

Case = dict[str, Any]  # with its name under "case", and under "order" the key it is sorted by


def earlier(name: str, out: Path | None) -> list[Case]:
    """The cases of earlier runs, unless they were made on another machine or with other versions."""
    try:
        found = json.loads((out or RESULTS / f"{name}.json").read_text("utf-8"))
        same = found["bench"] == name and found["environment"] == environment()
        return list(found["cases"]) if same else []
    except (OSError, ValueError, LookupError, TypeError):
        return []


def merged(older: Iterable[Case], newer: Iterable[Case]) -> list[Case]:
    """All cases in their order, each as it was measured last."""
    cases = {case["case"]: case for case in (*older, *newer)}
    return sorted(cases.values(), key=lambda case: list(case["order"]))


def keep(name: str, out: Path | None, about: dict[str, Any], newer: Iterable[Case]) -> dict[str, Any]:
    """Write the record with these cases in it, and return it. about: what the record says besides."""
    cases = merged(earlier(name, out), newer)
    record = {"bench": name, **about, "environment": environment(), "cases": cases}
    write_result(name, record, out)
    return record

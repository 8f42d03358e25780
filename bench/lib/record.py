"""A record that accumulates cases over several runs; a repeated case replaces its earlier result."""

from __future__ import annotations

import json
from typing import Any

from bench.lib.report import Report, environment

Case = dict[str, Any]  # its name is under "case", its sort key under "order"


def keep(report: Report, about: dict[str, Any], newer: Case) -> dict[str, Any]:
    """Add a case to the record, write it, and return it. about: other contents of the record.

    Cases of earlier runs are kept, unless they come from another machine or other versions.
    """
    machine, cases = environment(), dict[str, Case]()
    try:
        found = json.loads(report.file().read_text("utf-8"))
        if (found["bench"], found["environment"]) == (report.name, machine):
            cases = {case["case"]: case for case in found["cases"]}
    except (OSError, ValueError, LookupError, TypeError):
        pass  # no earlier record
    cases[newer["case"]] = newer
    ordered = sorted(cases.values(), key=lambda case: list(case["order"]))
    record = {"bench": report.name, **about, "environment": machine, "cases": ordered}
    report.write(record)
    return record

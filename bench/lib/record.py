"""A record that grows case by case: what is measured again takes the place of what was measured before."""

from __future__ import annotations

import json
from typing import Any

from bench.lib.report import Report, environment

Case = dict[str, Any]  # with its name under "case", and under "order" the key it is sorted by


def keep(report: Report, about: dict[str, Any], newer: Case) -> dict[str, Any]:
    """Write the record with this case in it, and return it. about: what the record says besides.

    Cases of earlier runs stay, unless they were made on another machine or with other versions.
    """
    machine, cases = environment(), dict[str, Case]()
    try:
        found = json.loads(report.file().read_text("utf-8"))
        if (found["bench"], found["environment"]) == (report.name, machine):
            cases = {case["case"]: case for case in found["cases"]}
    except (OSError, ValueError, LookupError, TypeError):
        pass  # there is none
    cases[newer["case"]] = newer
    ordered = sorted(cases.values(), key=lambda case: list(case["order"]))
    record = {"bench": report.name, **about, "environment": machine, "cases": ordered}
    report.write(record)
    return record

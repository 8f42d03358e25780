"""Worker process that runs checks and writes their findings as JSON lines.

    python -m offspec.engine.doctor.worker DESCRIPTOR JOB

JOB is a JSON object with a list of checks, as in `run_checks.CHECKS`, and a list of folders. Each line
written to DESCRIPTOR is {"begun": key}, {"finding": {...}} or {"ended": key}.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from offspec.core.openmp import limit_spinning
from offspec.engine.doctor.finding import DoctorOptions, Finding

REPORT = "unexpected: please report this with the output of `offspec doctor --json`"


def run_check(title: str, place: str, options: DoctorOptions) -> Iterator[Finding]:
    """Yield the findings of a check; an unexpected error becomes one more finding.

    Args:
        title: Name of the tested part.
        place: Function of the check, as "module:name".
        options: Options of the run.
    """
    try:
        function: Callable[[DoctorOptions], Iterator[Finding]] = resolve_name(place)
        yield from function(options)
    except Exception as error:
        yield Finding(title, "failed", cause_of(error), REPORT)


def cause_of(error: BaseException, limit: int = 300) -> str:
    """Return an error in one line: its type and the first non-empty line of its text."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__


def _main(descriptor: int, job: dict[str, Any]) -> None:
    limit_spinning()
    options = DoctorOptions(tuple(map(Path, job["folders"])))
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as out:

        def send(**message: object) -> None:
            out.write(json.dumps(message) + "\n")

        for key, title, place in job["checks"]:
            send(begun=key)
            for finding in run_check(title, place, options):
                send(finding=finding.to_json())
            send(ended=key)


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]))

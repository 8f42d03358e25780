"""The process that runs checks, and tells what they find in lines of JSON.

    python -m offspec.engine.doctor.worker DESCRIPTOR JOB

JOB is a JSON object of a list of checks, as `examine.CHECKS` has them, and of folders. Each line that is
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
from offspec.engine.doctor.finding import Asked, Finding

REPORT = "this is not foreseen: please report it with the output of `offspec doctor --json`"


def found_by(title: str, place: str, asked: Asked) -> Iterator[Finding]:
    """What a check finds; where it fails in a way that it does not foresee, that is one more finding.

    Args:
        title: What it looks at.
        place: Where its function is, as "module:name".
        asked: What it is given.
    """
    try:
        function: Callable[[Asked], Iterator[Finding]] = resolve_name(place)
        yield from function(asked)
    except Exception as error:
        yield Finding(title, "failed", cause_of(error), REPORT)


def cause_of(error: BaseException, limit: int = 300) -> str:
    """An error in one line: its type, and the first line of it that says something."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:limit]}" if lines else type(error).__name__


def _main(descriptor: int, job: dict[str, Any]) -> None:
    limit_spinning()
    asked = Asked(tuple(map(Path, job["folders"])))
    with os.fdopen(descriptor, "w", encoding="utf-8", buffering=1) as out:

        def tell(**message: object) -> None:
            out.write(json.dumps(message) + "\n")

        for key, title, place in job["checks"]:
            tell(begun=key)
            for finding in found_by(title, place, asked):
                tell(finding=finding.to_json())
            tell(ended=key)


if __name__ == "__main__":
    _main(int(sys.argv[1]), json.loads(sys.argv[2]))

"""Finds the line of the project that made a call."""

import sys
from functools import cache
from pathlib import Path
from types import CodeType

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


def caller() -> str:
    """Return the nearest line of the project outside the simulation, as "offspec/draft/lm.py:120"."""
    frame = sys._getframe(1)
    while frame is not None:
        file = _file(frame.f_code)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def _file(code: CodeType) -> str:
    path = Path(code.co_filename)
    if not path.is_relative_to(_ROOT) or path.is_relative_to(_HERE) or "site-packages" in path.parts:
        return ""
    return str(path.relative_to(_ROOT))

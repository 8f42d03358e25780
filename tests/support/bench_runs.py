"""Result of a benchmark run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ran:
    """lines: of stdout. summary: the last line. record: content of the file."""

    code: int
    lines: list[str]
    summary: dict[str, Any]
    record: dict[str, Any]


RunBench = Callable[..., Ran]  # a bench's `main` and its arguments

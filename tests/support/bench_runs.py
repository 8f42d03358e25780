"""What a run of a bench left."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ran:
    """lines: of stdout. summary: the last of them. record: the file's content."""

    code: int
    lines: list[str]
    summary: dict[str, Any]
    record: dict[str, Any]


RunBench = Callable[..., Ran]  # of a bench's `main` and words

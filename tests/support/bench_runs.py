"""What a run of a bench left."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Ran:
    """lines: of stdout. summary: the last of them. record: the file's content. plot: where one would be."""

    code: int
    lines: list[str]
    summary: dict[str, Any]
    record: dict[str, Any]
    plot: Path


RunBench = Callable[..., Ran]  # of a bench's `main` and words

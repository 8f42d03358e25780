"""Records of measurements in bench/results/."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "bench" / "results"


@dataclass(frozen=True)
class Record:
    """A file in bench/results/, or a part of it.

    Args:
        file: Name below bench/results/.
        path: Keys and indexes of the part, from the outermost.
    """

    file: str
    path: tuple[str | int, ...] = ()

    def __getitem__(self, keys: str | int | tuple[str | int, ...]) -> Any:
        """The value at these keys; a Record if that is not a figure."""
        part = Record(self.file, self.path + (keys if isinstance(keys, tuple) else (keys,)))
        value = part.value
        return part if isinstance(value, dict | list) else value

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[Any]:
        return (self[key] for key in (self.value if isinstance(self.value, dict) else range(len(self))))

    @property
    def value(self) -> Any:
        """Content of the file at this path."""
        found = _content(self.file)
        for key in self.path:
            found = found[key]
        return found


@cache
def _content(file: str) -> Any:
    return json.loads((RESULTS / file).read_text("utf-8"))

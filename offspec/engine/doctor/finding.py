"""What a check found, and what it is asked."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# Works; works, but slower or with less than it could; does not work; is not there, so that nothing was tried.
State = Literal["ok", "limited", "failed", "absent"]
Figure = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        part: What was looked at, in a word or two.
        state: Whether it works.
        found: What there is, or why it does not work, in one line.
        remedy: What to do about it; "" where there is nothing to do.
        figures: The same as values, for a bug report.
    """

    part: str
    state: State
    found: str
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Begun:
    """A check begins. title: what it looks at."""

    title: str


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user named. folders: on the disks to look at, beside those of the caches."""

    folders: tuple[Path, ...] = ()

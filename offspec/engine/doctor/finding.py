"""Results and options of the checks."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

# ok: works. limited: works, but slower or with less than possible. failed: does not work. absent: not tested,
# because it does not exist here.
State = Literal["ok", "limited", "failed", "absent"]
Figure = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        part: Name of the tested part, one or two words.
        state: Whether the part works.
        found: Description of the part, or the reason why it does not work, in one line.
        remedy: Fix for the user; "" if there is nothing to do.
        figures: Values of the finding, for a bug report.
    """

    part: str
    state: State
    found: str
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class CheckStarted:
    """Event at the start of a check; `title` names the tested part."""

    title: str


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Options of a run; `folders` are on additional disks to check, next to those of the caches."""

    folders: tuple[Path, ...] = ()

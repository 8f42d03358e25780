"""Files in the cache for later runs: plans, and what was learned about drafts and experts.

A damaged file is treated as missing and is written again. Only a plan that the user names is read strictly.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offspec.core.cache_dir import cache_root
from offspec.core.errors import OffspecError, PlanError
from offspec.core.files import write_atomic
from offspec_planners.acceptance import Calibration
from offspec_planners.expert_costs import ExpertSizes, ExpertUse
from offspec_planners.json_fields import parse
from offspec_planners.plan import Plan
from offspec_planners.typical_acceptance import MODEL, TypicalDraft

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_VERSION = 1

CalibrationKey = tuple[float, bool]  # temperature, to two digits, and whether the noise is coupled


def key_of(*parts: object) -> str:
    """Return a file's name from the values that identify a case."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def read_plan(file: Path) -> Plan:
    """Read a plan that the user named. Raises PlanError."""
    try:
        return Plan.from_text(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"cannot read the plan {file}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{file} is not a valid plan: {error}") from error


def load_plan(key: str) -> Plan | None:
    """Return the plan that an earlier run made for the same case."""
    try:
        return Plan.from_text(_plan_file(key).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def saved_plans() -> Iterator[Plan]:
    """Yield all plans that earlier runs made."""
    for file in sorted((cache_root() / "plans").glob("*.json")):
        if (plan := load_plan(file.stem)) is not None:
            yield plan


def save_plan(key: str, plan: Plan) -> None:
    """Save a plan for later runs; if that is impossible, they make it again."""
    write_if_possible(_plan_file(key), plan.to_text())


def _plan_file(key: str) -> Path:
    return cache_root() / "plans" / f"{key}.json"


class DraftRecord:
    """Measured acceptance of one draft for one target, by temperature and verification rule.

    `entry` returns a calibration that engines update; `save` writes those, and keeps what other processes
    saved at other temperatures.

    Args:
        target: Fingerprint of the target.
        draft: Fingerprint of the draft.
        bits: Bits of the draft's matrices, 16 (the default) if they are not quantized. Other bits make
            another draft.
        kind: "self-draft", "model" (the default) or "head".
        typical: Acceptance to assume before it is measured. Default: that of a model.
        keeps: Whether `save` writes anything. Default True.
    """

    def __init__(
        self,
        target: str,
        draft: str,
        bits: int = 16,
        *,
        kind: str = "model",
        typical: TypicalDraft = MODEL,
        keeps: bool = True,
    ) -> None:
        self.kind, self.typical, self.bits, self.keeps = kind, typical, bits, keeps
        self._used = set[CalibrationKey]()
        self._file = cache_root() / "drafts" / f"{key_of(target, draft, bits)}.json"
        self._entries: dict[CalibrationKey, Calibration] = {}
        for name, value in self._saved().items():
            with suppress(ValueError):
                self._entries[_case_named(name)] = Calibration.from_json(value)

    def _saved(self) -> dict[str, Any]:
        entries = _read(self._file).get("entries")
        return entries if isinstance(entries, dict) else {}

    def find(self, temperature: float, coupled: bool) -> Calibration | None:
        """Return the calibration of this temperature, if there is one."""
        return self._entries.get(calibration_key(temperature, coupled))

    def nearest(self, temperature: float, coupled: bool) -> Calibration | None:
        """Return the calibration of the nearest temperature; greedy decoding is the same for all rules."""
        known = {
            case[0]: entry
            for case, entry in self._entries.items()
            if entry.passes and case == calibration_key(case[0], coupled)
        }
        if not known:
            return None
        return known[min(known, key=lambda other: abs(other - temperature))]

    def entry(self, temperature: float, coupled: bool) -> Calibration:
        """Return the calibration to update."""
        case = calibration_key(temperature, coupled)
        self._used.add(case)
        if case not in self._entries:
            self._entries[case] = Calibration()
        return self._entries[case]

    def save(self) -> None:
        """Save the calibrations; if that is impossible, later runs learn them again."""
        learnt = {_name(case): self._entries[case] for case in self._used if self._entries[case].passes}
        if not (self.keeps and learnt):
            return
        entries = self._saved() | {name: entry.to_json() for name, entry in learnt.items()}
        write_if_possible(
            self._file, json.dumps({"version": _VERSION, "entries": entries}, separators=(",", ":"))
        )


class ExpertRecord:
    """Measured use of a model's experts; `save` keeps it for later runs.

    Args:
        target: Fingerprint of the model.
        sizes: Sizes of its experts.
        keeps: Whether `save` writes anything. Default True.
    """

    def __init__(self, target: str, sizes: ExpertSizes, *, keeps: bool = True) -> None:
        self.layers, self.keeps = len(sizes.layers), keeps
        self.use = ExpertUse(sizes.count, sizes.chosen)
        self._file = cache_root() / "expert_use" / f"{key_of(target)}.json"
        with suppress(ValueError):
            self.use.restore(_read(self._file))
        self._known = self.use.passes

    def save(self) -> None:
        """Save the measurements; if that is impossible, later runs repeat them."""
        if self.keeps and self.use.passes > self._known:
            self._known = self.use.passes
            write_if_possible(self._file, json.dumps({"version": _VERSION, **self.use.to_json()}))


def preload_experts(target: LoadedModel, target_print: str) -> None:
    """Preload the experts that earlier runs used most into a loaded target.

    They are read while nothing else is, into slots that are free.
    """
    if (store := target.store) is None:
        return
    shares = _read(_experts_file(target_print)).get("shares")
    if not isinstance(shares, list) or len(shares) != len(store.layouts):
        return
    if all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
        store.restore_usage([float(share) for share in shares])


def save_experts(target: LoadedModel, target_print: str) -> None:
    """Save the usage of each expert; if that is impossible, later runs learn it again."""
    store = target.store
    if store is None or not store.stats.requested:
        return
    shares = [round(float(share), 4) for share in store.usage.shares]
    text = json.dumps({"version": _VERSION, "shares": shares}, separators=(",", ":"))
    write_if_possible(_experts_file(target_print), text)


def _experts_file(target_print: str) -> Path:
    return cache_root() / "experts" / f"{key_of(target_print)}.json"


def calibration_key(temperature: float, coupled: bool) -> CalibrationKey:
    """Return the key of a calibration: temperatures are rounded, and greedy decoding has one key for all
    rules.
    """
    return float(f"{temperature:.2g}"), coupled and temperature > 0


def _name(case: CalibrationKey) -> str:
    return f"{case[0]:.2g} {'coupled' if case[1] else 'alone'}"


def _case_named(name: str) -> CalibrationKey:
    """Parse the key from an entry's name. Raises ValueError for an invalid name."""
    number, _, rule = name.partition(" ")
    case = calibration_key(float(number), rule == "coupled")
    if not 0 <= case[0] < math.inf or _name(case) != name:
        raise ValueError(f"{name!r} is not a temperature and rule")
    return case


def _read(file: Path) -> dict[str, Any]:
    """Read the object in a file; empty if there is none, or none that this version can read."""
    try:
        found = parse(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.pop("version", None) == _VERSION else {}


def write_if_possible(file: Path, text: str) -> None:
    """Write an optional file; if it cannot be written, the next run does without."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text.encode())
    except (OSError, OffspecError):
        return

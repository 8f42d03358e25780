"""What runs leave for later runs: plans, and what was learnt of drafts and experts. Files in the cache.

A file that is damaged is as good as none here: it is made again. Only a plan that the user names is read
strictly.
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
from offspec.core.files import write_file
from offspec_planners.acceptance import Calibration
from offspec_planners.expert_costs import ExpertSizes, ExpertUse
from offspec_planners.json_fields import parse
from offspec_planners.plan import Plan
from offspec_planners.typical_acceptance import MODEL, TypicalDraft

if TYPE_CHECKING:
    from offspec.model.loaded import LoadedModel

_VERSION = 1

Case = tuple[float, bool]  # temperature, to two digits, and whether the noise is coupled


def key_of(*parts: object) -> str:
    """A file's name from whatever tells one case from another."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def read_plan(file: Path) -> Plan:
    """A plan that the user names. Raises PlanError."""
    try:
        return Plan.from_text(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(
            f"cannot read the plan {file}: {getattr(error, 'strerror', None) or error}"
        ) from error
    except ValueError as error:
        raise PlanError(f"{file} is not a plan that can be used: {error}") from error


def load_plan(key: str) -> Plan | None:
    """The plan that an earlier run made for the same case."""
    try:
        return Plan.from_text(_plan_file(key).read_text("utf-8"))
    except (OSError, ValueError):
        return None


def saved_plans() -> Iterator[Plan]:
    """All plans that earlier runs made."""
    for file in sorted((cache_root() / "plans").glob("*.json")):
        if (plan := load_plan(file.stem)) is not None:
            yield plan


def save_plan(key: str, plan: Plan) -> None:
    """Leave a plan for later runs; where nothing can be written, they make it again."""
    write_if_possible(_plan_file(key), plan.to_text())


def _plan_file(key: str) -> Path:
    return cache_root() / "plans" / f"{key}.json"


class DraftRecord:
    """Measured acceptance of one draft for one target, by temperature and rule.

    `entry` gives a calibration that engines update; `save` writes those, and keeps what other processes saved
    at other temperatures.

    Args:
        target: Fingerprint of the target.
        draft: Fingerprint of the draft.
        bits: Of the draft's matrices, 16 (the default) where they are not rounded. In other bits it is
            another draft.
        kind: "substitute", "model" (the default) or "head".
        typical: How well it is expected to guess. Default: as a model.
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
        self._used = set[Case]()
        self._file = cache_root() / "drafts" / f"{key_of(target, draft, bits)}.json"
        self._entries: dict[Case, Calibration] = {}
        for name, value in self._saved().items():
            with suppress(ValueError):
                self._entries[_case_named(name)] = Calibration.from_json(value)

    def _saved(self) -> dict[str, Any]:
        entries = _read(self._file).get("entries")
        return entries if isinstance(entries, dict) else {}

    def find(self, temperature: float, coupled: bool) -> Calibration | None:
        """What was learnt at this temperature, if anything was."""
        return self._entries.get(case_of(temperature, coupled))

    def nearest(self, temperature: float, coupled: bool) -> Calibration | None:
        """The same, or what was learnt at the nearest other temperature; greedy decoding knows no rule."""
        known = {
            case[0]: entry
            for case, entry in self._entries.items()
            if entry.passes and case == case_of(case[0], coupled)
        }
        if not known:
            return None
        return known[min(known, key=lambda other: abs(other - temperature))]

    def entry(self, temperature: float, coupled: bool) -> Calibration:
        """The calibration to learn into."""
        case = case_of(temperature, coupled)
        self._used.add(case)
        if case not in self._entries:
            self._entries[case] = Calibration()
        return self._entries[case]

    def save(self) -> None:
        """Keep what was learnt; where nothing can be written, it is learnt again."""
        learnt = {_name(case): self._entries[case] for case in self._used if self._entries[case].passes}
        if not (self.keeps and learnt):
            return
        entries = self._saved() | {name: entry.to_json() for name, entry in learnt.items()}
        write_if_possible(
            self._file, json.dumps({"version": _VERSION, "entries": entries}, separators=(",", ":"))
        )


class ExpertRecord:
    """What runs learnt of how a model uses its experts; `save` keeps it for later runs.

    Args:
        target: Fingerprint of the model.
        sizes: Of its experts.
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
        """Keep what was learnt; where nothing can be written, it is learnt again."""
        if self.keeps and self.use.passes > self._known:
            self._known = self.use.passes
            write_if_possible(self._file, json.dumps({"version": _VERSION, **self.use.to_json()}))


def recall_experts(target: LoadedModel, target_print: str) -> None:
    """Have a target that was loaded keep the experts that earlier runs used most.

    They are read while nothing else is, into slots that nobody needs.
    """
    if (store := target.store) is None:
        return
    shares = _read(_experts_file(target_print)).get("shares")
    if not isinstance(shares, list) or len(shares) != len(store.layouts):
        return
    if all(isinstance(share, int | float) and 0 <= share <= 1 for share in shares):
        store.recall([float(share) for share in shares])


def save_experts(target: LoadedModel, target_print: str) -> None:
    """Leave how often rows asked for each expert; where nothing can be written, later runs learn it again."""
    store = target.store
    if store is None or not store.stats.asked:
        return
    shares = [round(float(share), 4) for share in store.usage.shares]
    text = json.dumps({"version": _VERSION, "shares": shares}, separators=(",", ":"))
    write_if_possible(_experts_file(target_print), text)


def _experts_file(target_print: str) -> Path:
    return cache_root() / "experts" / f"{key_of(target_print)}.json"


def case_of(temperature: float, coupled: bool) -> Case:
    """What learning about guesses is kept by: nearly equal temperatures are one, and greedily all rules."""
    return float(f"{temperature:.2g}"), coupled and temperature > 0


def _name(case: Case) -> str:
    return f"{case[0]:.2g} {'coupled' if case[1] else 'alone'}"


def _case_named(name: str) -> Case:
    """The case that a file names. Raises ValueError for what is no name of ours."""
    number, _, rule = name.partition(" ")
    case = case_of(float(number), rule == "coupled")
    if not 0 <= case[0] < math.inf or _name(case) != name:
        raise ValueError(f"{name} is no temperature and rule")
    return case


def _read(file: Path) -> dict[str, Any]:
    """The object of a file; an empty one where there is none, or none that this version can read."""
    try:
        found = parse(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and found.pop("version", None) == _VERSION else {}


def write_if_possible(file: Path, text: str) -> None:
    """Write a file that is only of use: where it cannot be written, the next run does without."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, text.encode())
    except (OSError, OffspecError):
        return

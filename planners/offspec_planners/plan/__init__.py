"""A plan: what goes where, how trees are grown, what speed to expect, and how it is written to a file.

The file is JSON that a person may edit. It begins with "offspec_plan", the version of its format; the tiers
of the layers are written in runs, as "5 disk, 1 device, 5 disk".
"""

import re
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from offspec_planners.cost import PassCosts
from offspec_planners.hardware import Hardware
from offspec_planners.json_fields import Fields, complain, layout, parse
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Choice, Forecast, WhatIf
from offspec_planners.plan.validation import Comparison, Validation, ValidationRow

__all__ = ["Choice", "Comparison", "Forecast", "Plan", "Validation", "ValidationRow", "WhatIf"]

VERSION = 2
DRAFT_MODES = ("full", "expanded", "packed", "head", "none")
ROUNDED_BITS = (2, 3, 4)  # of a draft that is expanded or packed; the others have 16
TREES = ("dynamic", "sequoia")

_TIERS = tuple(tier.value for tier in Tier)
_MOST_LAYERS = 10_000


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided about running one target with one draft on one machine.

    target_print, draft_print: fingerprints of their files; draft is "none" where nobody drafts.
    memory, vram: bytes that may be used, vram None where the computing is done in RAM.
    draft_bits: that the draft's matrices are rounded to, 16 where they are not, or where nobody drafts.
    parts: (what, tier, bytes) of all that takes room, and of what is left on disk. Those called "layers"
    and "head" cross a link in every pass unless they are on the device.
    measured: whether this draft's acceptance was counted, rather than taken from drafts of its kind;
    acceptance: where it comes from, in words.
    sweep: what other budgets and widths would give. least_memory, least_vram: the smallest that work.
    """

    target: str
    target_print: str
    draft: str
    draft_print: str
    hardware: Hardware
    device: str
    dtype: str
    memory: int
    vram: int | None
    context: int
    temperature: float
    draft_mode: str
    draft_bits: int
    chunk: int
    parts: tuple[tuple[str, str, int], ...]
    placement: Placement
    budget: int
    width: int
    depth: int
    tree: str
    costs: PassCosts
    forecast: Forecast
    sweep: tuple[Choice, ...]
    what_ifs: tuple[WhatIf, ...]
    acceptance: str
    least_memory: int
    least_vram: int | None
    notes: tuple[str, ...]
    measured: bool = False

    def memory_name(self, tier: Tier | str) -> str:
        """What a person calls a tier on this machine: RAM, VRAM or disk."""
        if tier == Tier.DISK:
            return "disk"
        return "RAM" if tier == Tier.HOST or self.vram is None else "VRAM"

    def streamed(self, *tiers: Tier) -> int:
        """Bytes of layers and head that leave these tiers in every pass."""
        return sum(size for what, tier, size in self.parts if what in ("layers", "head") and tier in tiers)

    @property
    def tok_per_s_alone(self) -> float:
        """The speed without a draft: one token a pass."""
        return 1 / max(float(self.costs.iteration(0.0, 1)), 1e-9)

    def to_json(self) -> dict[str, Any]:
        """The object of a plan file, which `from_json` reads."""
        values = {
            "offspec_plan": VERSION,
            **{name: getattr(self, name) for name in self.__dataclass_fields__},
            "placement": _placement_json(self.placement),
            "parts": [{"what": what, "tier": tier, "bytes": size} for what, tier, size in self.parts],
            "costs": _costs_json(self.costs),
            "forecast": asdict(self.forecast),
            "sweep": [asdict(choice) for choice in self.sweep],
            "what_ifs": [asdict(what_if) for what_if in self.what_ifs],
            "notes": list(self.notes),
        }
        values["hardware"] = values.pop("hardware").to_json()  # long, and so the last
        return values

    def to_text(self) -> str:
        """A plan file."""
        return layout(self.to_json()) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """A plan from a plan file. Raises ValueError, which says what is wrong with it."""
        return cls.from_json(parse(text))

    @classmethod
    def from_json(cls, value: object) -> "Plan":
        """A plan from the object of a plan file. Raises ValueError: a key, its value, what it should be."""
        if not isinstance(value, dict) or "offspec_plan" not in value:
            raise ValueError('this is not a plan: it has no "offspec_plan"')
        fields = Fields(value)
        version = fields.whole("offspec_plan", low=1)
        if version > VERSION:
            raise ValueError(f"offspec_plan is {version}; this version of offspec reads up to {VERSION}")
        if version < VERSION:  # earlier ones do not say how many bits the draft has
            raise ValueError(f"offspec_plan is {version}, of an earlier offspec; make one by `offspec plan`")
        mode = fields.choice("draft_mode", DRAFT_MODES)
        vram = fields.whole_or_none("vram", low=1)
        plan = cls(
            target=fields.text("target"),
            target_print=fields.text("target_print"),
            draft=fields.text("draft"),
            draft_print=fields.text("draft_print"),
            hardware=_read_hardware(fields),
            device=_read_device(fields, vram),
            dtype=fields.choice("dtype", ("bfloat16", "float32")),
            memory=fields.whole("memory", low=1),
            vram=vram,
            context=fields.whole("context", low=2),
            temperature=fields.number("temperature"),
            draft_mode=mode,
            draft_bits=_read_bits(fields, mode),
            chunk=fields.whole("chunk", low=1),
            parts=tuple(_read_part(part) for part in fields.rows("parts")),
            placement=_read_placement(fields.inner("placement"), apart=vram is not None),
            budget=fields.whole("budget", low=1),
            width=fields.whole("width", low=1),
            depth=fields.whole("depth"),
            tree=fields.choice("tree", TREES),
            costs=_read_costs(fields.inner("costs")),
            forecast=Forecast.read(fields.inner("forecast")),
            sweep=tuple(Choice.read(row) for row in fields.rows("sweep")),
            what_ifs=tuple(WhatIf.read(row) for row in fields.rows("what_ifs")),
            acceptance=fields.text("acceptance"),
            least_memory=fields.whole("least_memory"),
            least_vram=fields.whole_or_none("least_vram"),
            notes=fields.texts("notes"),
            measured="measured" in fields
            and fields.flag("measured"),  # added later; without it, it is made anew
        )
        fields.done()
        return plan


def _read_hardware(fields: Fields) -> Hardware:
    value = fields.take("hardware", "a JSON object")
    if not isinstance(value, dict):
        fields.wrong("hardware", "a JSON object")
    try:
        return Hardware.from_json(value)
    except ValueError as error:
        raise ValueError(f"hardware: {error}") from None


def _read_device(fields: Fields, vram: int | None) -> str:
    device = fields.text("device")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        fields.wrong("device", '"cpu" or "cuda"')
    if vram is not None and device == "cpu":
        fields.wrong("vram", "null, since the device is a CPU")
    if vram is None and device != "cpu":
        fields.wrong("vram", f"a number of bytes, since the device is {device}")
    return device


def _read_bits(fields: Fields, mode: str) -> int:
    bits, rounded = fields.whole("draft_bits"), mode in ("expanded", "packed")
    if rounded and bits not in ROUNDED_BITS:
        fields.wrong("draft_bits", f"2, 3 or 4, since the draft is {mode}")
    if not rounded and bits != 16:
        fields.wrong("draft_bits", f'16, since draft_mode is "{mode}"')
    return bits


def _read_part(fields: Fields) -> tuple[str, str, int]:
    part = fields.text("what"), fields.choice("tier", _TIERS), fields.whole("bytes")
    fields.done()
    return part


def _costs_json(costs: PassCosts) -> dict[str, Any]:
    curves = {name: [list(point) for point in getattr(costs, name)] for name in ("compute", "step", "edge")}
    return {**asdict(costs), **curves}


def _read_costs(fields: Fields) -> PassCosts:
    costs = PassCosts(
        compute=fields.points("compute"),
        step=fields.points("step"),
        start=fields.number("start"),
        link=fields.number("link"),
        rest=fields.number("rest"),
        edge=fields.points("edge"),
    )
    fields.done()
    return costs


def _placement_json(placement: Placement) -> dict[str, Any]:
    runs = [(tier.value, len(list(layers))) for tier, layers in groupby(placement.tiers)]
    return {
        "tiers": ", ".join(f"{count} {tier}" for tier, count in runs),
        "head": placement.head.value,
        "slots": placement.slots,
        "staging": placement.staging,
    }


def _read_placement(fields: Fields, *, apart: bool) -> Placement:
    """apart: the device has memory of its own, so that RAM is one more tier and disk needs staging."""
    tiers = _read_tiers(fields)
    head = Tier(fields.choice("head", _TIERS))
    slots, staging = fields.whole("slots"), fields.whole("staging")
    fields.done()
    used = {*tiers, head}
    if not apart and Tier.HOST in tiers:
        fields.wrong("tiers", 'made of "device" and "disk", since a CPU computes in RAM')
    if not apart and head is Tier.HOST:
        fields.wrong("head", '"device" or "disk", since a CPU computes in RAM')
    if (used != {Tier.DEVICE}) != (slots > 0):
        fields.wrong("slots", "0 where all is on the device, and above 0 where anything streams")
    if (apart and Tier.DISK in used) != (staging > 0):
        fields.wrong("staging", "above 0 where anything comes from disk to a GPU, and else 0")
    return Placement(tiers, slots, staging, head)


def _read_tiers(fields: Fields) -> tuple[Tier, ...]:
    text, tiers = fields.text("tiers"), list[Tier]()
    for run in text.split(","):
        found = re.fullmatch(rf"\s*(\d{{1,5}})\s+({'|'.join(_TIERS)})\s*", run, re.ASCII)
        count = int(found[1]) if found else 0
        if not found or not 0 < count <= _MOST_LAYERS - len(tiers):
            complain("placement.tiers", text, 'runs of layers, such as "5 disk, 1 device, 5 disk"')
        tiers += [Tier(found[2])] * count
    return tuple(tiers)

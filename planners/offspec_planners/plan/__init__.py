"""A plan: what goes where, how trees are grown, what speed to expect, and how it is written to a file.

The file is JSON that a person may edit. It begins with "offspec_plan", the version of its format; the tiers
of the layers are written in runs, as "5 disk, 1 device, 5 disk".
"""

import json
import re
from dataclasses import MISSING, asdict, dataclass, fields
from itertools import groupby
from typing import Annotated, Any

from msgspec import Meta

from offspec_planners.cost import PassCosts
from offspec_planners.hardware_rates import Hardware
from offspec_planners.json_fields import (
    LARGEST,
    Count,
    Number,
    Texts,
    Whole,
    complain,
    layout,
    one_of,
    parse,
    read,
    require_ascending,
    without_version,
)
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Choice, Forecast, Shared, WhatIf

VERSION = 2
FORMATS = ("nf4", "int8", "int4-g64")  # that a target is rounded to
MODEL_MODES = ("full", "expanded", "packed")  # of a draft that is a model of its own
ROUNDED_BITS = (2, 3, 4)  # of a draft that is expanded or packed; the others have 16

_TIERS = tuple(tier.value for tier in Tier)
_MOST_LAYERS = 10_000
_DEVICES = Meta(
    pattern=r"^(cpu|cuda(:\d+)?(,cuda:\d+)*)\Z", description='"cpu" or "cuda", or GPUs as "cuda:0,cuda:1"'
)


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes room: what it is, the tier it lies in, and how many bytes it takes.

    gpu: of several, the number of the one in whose memory it lies.
    """

    what: str
    tier: Annotated[str, one_of(*_TIERS)]
    bytes: Whole
    gpu: Whole = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided about running one target with one draft on one machine.

    target_print, draft_print: fingerprints of their files; draft is "none" without a draft.
    memory, vram: bytes that may be used, vram None where the computing is done in RAM; more_vram: of each
    further GPU.
    draft_bits: that the draft's matrices are rounded to, 16 where they are not, or without a draft.
    parts: all that takes room, and what is left on disk. Those called "layers"
    and "head" cross a link in every pass unless they are on the device.
    kv_cache: how the target keeps keys and values: in `dtype`, or in 8 bits. quantize: the format that its
    matrices are rounded to, None where they are as they were.
    measured: whether this draft's acceptance was counted, rather than taken from drafts of its kind;
    acceptance: where it comes from, in words.
    sweep: what other budgets and widths would give. least_memory, least_vram: the smallest that work.
    sequences: the most that share passes, whose nodes and tokens forecast and sweep add up; costs are those
    of one. shared: what other numbers of them would give, where there are several.
    """

    target: str
    target_print: str
    draft: str
    draft_print: str
    hardware: Hardware
    device: Annotated[str, _DEVICES]
    dtype: Annotated[str, one_of("bfloat16", "float32")]
    memory: Count
    vram: Count | None
    context: Annotated[int, Meta(ge=2, le=LARGEST, description="a whole number of 2 or more")]
    temperature: Number
    draft_mode: Annotated[str, one_of(*MODEL_MODES, "head", "none")]
    draft_bits: Whole
    chunk: Count
    parts: tuple[Part, ...]
    placement: Placement
    budget: Count
    width: Count
    depth: Whole
    tree: Annotated[str, one_of("dynamic", "sequoia")]
    costs: PassCosts
    forecast: Forecast
    sweep: tuple[Choice, ...]
    what_ifs: tuple[WhatIf, ...]
    acceptance: str
    least_memory: Whole
    least_vram: Whole | None
    notes: Texts
    measured: bool = False
    more_vram: tuple[Count, ...] = ()
    kv_cache: Annotated[str, one_of("model", "int8")] = "model"
    quantize: Annotated[str, one_of(*FORMATS)] | None = None
    sequences: Count = 1
    shared: tuple[Shared, ...] = ()

    def memory_name(self, tier: Tier | str) -> str:
        """Name of a tier on this machine: RAM, VRAM or disk."""
        if tier == Tier.DISK:
            return "disk"
        return "RAM" if tier in (Tier.HOST, Tier.CPU) or self.vram is None else "VRAM"

    def streamed(self, *tiers: Tier) -> int:
        """Bytes of layers and head that leave these tiers in every pass."""
        return sum(
            part.bytes for part in self.parts if part.what in ("layers", "head") and part.tier in tiers
        )

    @property
    def drafts_with_model(self) -> bool:
        """Whether a model drafts; otherwise heads do, lookups, or nothing."""
        return self.draft_mode in MODEL_MODES

    @property
    def tok_per_s_alone(self) -> float:
        """The speed without a draft: one token of each sequence a pass."""
        costs = self.costs.for_sequences(self.sequences)
        return self.sequences / max(float(costs.iteration(0.0, self.sequences)), 1e-9)

    def to_json(self) -> dict[str, Any]:
        """The object of a plan file, which `from_json` reads."""
        values: dict[str, Any] = {"offspec_plan": VERSION, **json.loads(json.dumps(asdict(self)))}
        values["placement"]["tiers"] = _write_tiers(self.placement.tiers)
        for name, usual in _OPTIONAL.items():
            if getattr(self, name) == usual:
                del values[name]
        if not self.more_vram:  # what several GPUs need
            del values["placement"]["gpus"]
            values["parts"] = [{k: v for k, v in part.items() if k != "gpu"} for part in values["parts"]]
        if self.placement.caches is Tier.DEVICE:
            del values["placement"]["caches"]
        if not self.placement.by_need:  # what experts by need add
            del values["placement"]["expert_slots"], values["placement"]["host_expert_slots"]
        if self.costs.experts is None:
            del values["costs"]["experts"]
        if not self.costs.caches:
            del values["costs"]["caches"]
        del values["hardware"]
        values["hardware"] = self.hardware.to_json()  # long, and so the last
        return values

    def to_text(self) -> str:
        """A plan file."""
        return layout(self.to_json()) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """A plan from a plan file. Raises ValueError, which says what is wrong with it."""
        return cls.from_json(parse(text))

    @classmethod
    def from_json(cls, value: Any) -> "Plan":
        """A plan from the object of a plan file. Raises ValueError: a key, its value, what it should be."""
        given = without_version(value, "offspec_plan", VERSION, "a plan")
        given = {"measured": False, **_OPTIONAL, **given}  # without `measured`, a plan is made anew
        if isinstance(given.get("costs"), dict):
            given["costs"] = {"experts": None, "caches": 0.0, **given["costs"]}
        if isinstance(given.get("parts"), list):
            given["parts"] = [
                {"gpu": 0, **part} if isinstance(part, dict) else part for part in given["parts"]
            ]
        version = value["offspec_plan"]
        if version < VERSION:  # earlier ones do not say how many bits the draft has
            raise ValueError(f"offspec_plan is {version}, of an earlier offspec; make one by `offspec plan`")
        if isinstance(given.get("hardware"), dict):
            try:
                given["hardware"] = Hardware.from_json(given["hardware"])
            except ValueError as error:
                raise ValueError(f"hardware: {error}") from None
        placement = given.get("placement")
        if isinstance(placement, dict) and "tiers" in placement:
            absent = {"gpus": [], "caches": "device", "expert_slots": 0, "host_expert_slots": 0}
            given["placement"] = {**absent, **placement, "tiers": _read_tiers(placement["tiers"])}
        plan = read(given, cls)
        plan._check()
        return plan

    def _check(self) -> None:
        """Raise ValueError where one value of a plan does not fit another."""
        apart, rounded = self.vram is not None, self.draft_mode in ("expanded", "packed")
        tiers, head = self.placement.tiers, self.placement.head
        used = {*tiers, head}
        streams, staged = any(tier.streams for tier in used), apart and Tier.DISK in used
        if apart == (self.device == "cpu"):
            should = "null, since the device is a CPU" if apart else "a number of bytes, since the device is "
            complain("vram", self.vram, should if apart else should + self.device)
        if len(self.placement.gpus) not in (0, len(tiers)) or self.placement.gpu_count > 1 + len(
            self.more_vram
        ):
            should = (
                f"a number from 0 to {len(self.more_vram)} for each layer, or empty where there is one GPU"
            )
            complain("placement.gpus", self.placement.gpus, should)
        if rounded and self.draft_bits not in ROUNDED_BITS:
            complain("draft_bits", self.draft_bits, f"2, 3 or 4, since the draft is {self.draft_mode}")
        if not rounded and self.draft_bits != 16:
            complain("draft_bits", self.draft_bits, f'16, since draft_mode is "{self.draft_mode}"')
        if not apart and not {Tier.HOST, Tier.CPU}.isdisjoint(tiers):
            complain("placement.tiers", tiers, 'made of "device" and "disk", since a CPU computes in RAM')
        if head is Tier.CPU:
            complain("placement.head", head, '"device", "host" or "disk"')
        if not apart and head is Tier.HOST:
            complain("placement.head", head, '"device" or "disk", since a CPU computes in RAM')
        one = apart and Tier.CPU not in tiers and not self.more_vram
        if self.placement.caches not in ((Tier.DEVICE, Tier.HOST) if one else (Tier.DEVICE,)):
            should = '"device", or on a GPU that computes all layers "host"'
            complain("placement.caches", self.placement.caches, should)
        if streams != (self.placement.slots > 0):
            should = "0 where all is on the device, and above 0 where anything streams"
            complain("placement.slots", self.placement.slots, should)
        if staged != (self.placement.staging > 0):
            should = "above 0 where anything comes from disk to a GPU, and else 0"
            complain("placement.staging", self.placement.staging, should)
        experts = self.costs.experts
        if (experts is None) == self.placement.by_need:
            should = "0 where costs.experts is null, and else above 0"
            complain("placement.expert_slots", self.placement.expert_slots, should)
        if self.placement.host_expert_slots and not apart:
            complain(
                "placement.host_expert_slots",
                self.placement.host_expert_slots,
                "0, since a CPU computes in RAM",
            )
        if self.budget < self.sequences:
            complain("budget", self.budget, f"at least {self.sequences}, a node of each sequence")
        for name in ("compute", "step", "edge"):
            require_ascending(getattr(self.costs, name), f"costs.{name}")
        for name in ("compute", "spread", "reuse") if experts else ():
            require_ascending(getattr(experts, name), f"costs.experts.{name}")


# Fields that a file has if their values are not these.
_OPTIONAL = {
    field.name: field.default
    for field in fields(Plan)
    if field.default is not MISSING and field.name != "measured"
}


def _write_tiers(tiers: tuple[Tier, ...]) -> str:
    return ", ".join(f"{len(list(run))} {tier.value}" for tier, run in groupby(tiers))


def _read_tiers(text: object) -> tuple[Tier, ...]:
    tiers = list[Tier]()
    for run in text.split(",") if isinstance(text, str) else [""]:
        found = re.fullmatch(rf"\s*(\d{{1,5}})\s+({'|'.join(_TIERS)})\s*", run, re.ASCII)
        count = int(found[1]) if found else 0
        if not found or not 0 < count <= _MOST_LAYERS - len(tiers):
            complain("placement.tiers", text, 'runs of layers, such as "5 disk, 1 device, 5 disk"')
        tiers += [Tier(found[2])] * count
    return tuple(tiers)

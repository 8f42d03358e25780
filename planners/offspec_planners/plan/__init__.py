"""Plan of a run: placement, tree growth and expected speed, and its file format.

The file is user-editable JSON. It begins with "offspec_plan", the version of its format; the tiers of the
layers are written in runs, such as "5 disk, 1 device, 5 disk".
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
    check_version,
    complain,
    layout,
    one_of,
    parse,
    read,
    require_ascending,
)
from offspec_planners.placement import Placement, Tier
from offspec_planners.plan.forecast import Choice, Forecast, Shared, WhatIf

VERSION = 2
FORMATS = ("nf4", "int8", "int4-g64")  # to quantize a target to
MODEL_MODES = ("full", "expanded", "packed")  # of a draft that is a model
ROUNDED_BITS = (2, 3, 4)  # of an expanded or packed draft; others have 16

_TIERS = tuple(tier.value for tier in Tier)
_MOST_LAYERS = 10_000
_DEVICES = Meta(
    pattern=r"^(cpu|cuda(:\d+)?(,cuda:\d+)*)\Z", description='"cpu" or "cuda", or GPUs as "cuda:0,cuda:1"'
)


@dataclass(frozen=True, slots=True)
class Part:
    """One consumer of memory: its name, tier and bytes.

    gpu: number of the GPU whose memory it uses, if there are several.
    """

    what: str
    tier: Annotated[str, one_of(*_TIERS)]
    bytes: Whole
    gpu: Whole = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """All decisions about running one target with one draft on one machine.

    target_print, draft_print: fingerprints of their files; draft is "none" without a draft.
    memory, vram: bytes that may be used, vram None when computing in RAM; more_vram: limits of further GPUs.
    draft_bits: bits of the draft's quantized matrices, 16 if not quantized or without a draft.
    parts: all consumers of memory, and weights left on disk. The parts "layers"
    and "head" cross a link in every pass unless they are on the device.
    kv_cache: storage of the target's KV cache: in `dtype`, or in 8 bits. quantize: format to which its
    matrices are quantized, None if unchanged.
    measured: whether this draft's acceptance was measured, and not taken from typical drafts;
    acceptance: its source, in words.
    sweep: forecasts for other budgets and widths. least_memory, least_vram: minimum working limits.
    sequences: maximum number of sequences that share passes, whose nodes and tokens forecast and sweep sum
    up; costs are for one sequence. shared: forecasts for other numbers of sequences, if there are several.
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
        """Return the name of a tier on this machine: RAM, VRAM or disk."""
        if tier == Tier.DISK:
            return "disk"
        return "RAM" if tier in (Tier.HOST, Tier.CPU) or self.vram is None else "VRAM"

    def streamed(self, *tiers: Tier) -> int:
        """Return the bytes of layers and head transferred from these tiers in every pass."""
        return sum(
            part.bytes for part in self.parts if part.what in ("layers", "head") and part.tier in tiers
        )

    @property
    def drafts_with_model(self) -> bool:
        """Whether a model drafts, and not heads, lookups or nothing."""
        return self.draft_mode in MODEL_MODES

    @property
    def tok_per_s_alone(self) -> float:
        """Tokens per second without a draft: one token of each sequence per pass."""
        costs = self.costs.for_sequences(self.sequences)
        return self.sequences / max(float(costs.iteration(0.0, self.sequences)), 1e-9)

    def to_json(self) -> dict[str, Any]:
        """Return the object of a plan file, which `from_json` reads."""
        values: dict[str, Any] = {"offspec_plan": VERSION, **json.loads(json.dumps(asdict(self)))}
        values["placement"]["tiers"] = _write_tiers(self.placement.tiers)
        for name, usual in _OPTIONAL.items():
            if getattr(self, name) == usual:
                del values[name]
        if not self.more_vram:  # only for several GPUs
            del values["placement"]["gpus"]
            values["parts"] = [{k: v for k, v in part.items() if k != "gpu"} for part in values["parts"]]
        if self.placement.caches is Tier.DEVICE:
            del values["placement"]["caches"]
        if not self.placement.on_demand_experts:  # only for on-demand experts
            del values["placement"]["expert_slots"], values["placement"]["host_expert_slots"]
        if self.costs.experts is None:
            del values["costs"]["experts"]
        if not self.costs.caches:
            del values["costs"]["caches"]
        del values["hardware"]
        values["hardware"] = self.hardware.to_json()  # last because it is long
        return values

    def to_text(self) -> str:
        """Return the text of a plan file."""
        return layout(self.to_json()) + "\n"

    @classmethod
    def from_text(cls, text: str) -> "Plan":
        """Parse a plan file. Raises ValueError, which describes the problem."""
        return cls.from_json(parse(text))

    @classmethod
    def from_json(cls, value: Any) -> "Plan":
        """Load a plan from a plan file's object. Raises ValueError: a key, its value, the expected value."""
        given = check_version(value, "offspec_plan", VERSION, "a plan")
        given = {"measured": False, **_OPTIONAL, **given}  # a plan without `measured` is computed again
        if given.get("draft") == "substitute":  # as earlier versions called the self-draft
            given["draft"] = "self"
        if isinstance(given.get("costs"), dict):
            given["costs"] = {"experts": None, "caches": 0.0, **given["costs"]}
        if isinstance(given.get("parts"), list):
            given["parts"] = [
                {"gpu": 0, **part} if isinstance(part, dict) else part for part in given["parts"]
            ]
        version = value["offspec_plan"]
        if version < VERSION:  # earlier versions lack the draft's bits
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
        """Raise ValueError if one value of a plan does not match another."""
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
        if (experts is None) == self.placement.on_demand_experts:
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


# Optional fields, and the values at which a file omits them.
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

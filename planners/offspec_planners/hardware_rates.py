"""What a machine can do: rates of its disk, its link and its processor, and their JSON.

A profile is measured (`measure`), taken from a preset, or written by hand; whatever reads one does not care
which. Bytes are plain numbers, rates are per second.
"""

import hashlib
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from offspec_planners.json_fields import (
    LARGEST,
    Count,
    Number,
    Positive,
    Texts,
    layout,
    parse,
    read,
    require_ascending,
    without_version,
)

VERSION = 1
_SLOWEST_MEMORY = 1e9  # bytes per second; what was measured to be slower was something else
_GB = 10**9
# In the names of presets.
_SEPARATORS, _MAKERS, _MEMORY = re.compile(r"[\s_-]+"), re.compile(r"nvidia|geforce"), re.compile(r"-\d+gb\b")


@dataclass(frozen=True, slots=True)
class Rate:
    """Something per second, measured several times: the median and the extremes.

    For a published figure all three are the same.
    """

    value: Positive
    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError("the extremes of a rate lie on either side of it")

    @classmethod
    def of(cls, readings: Sequence[float]) -> "Rate":
        """Of at least one reading."""
        return cls(statistics.median(readings), min(readings), max(readings))

    @classmethod
    def exactly(cls, value: float) -> "Rate":
        return cls(value, value, value)

    @property
    def spread(self) -> float:
        """How far apart the extremes are, as a share of the median."""
        return (self.high - self.low) / self.value

    def times(self, factor: float) -> "Rate":
        """The rate multiplied by a factor."""
        return Rate(self.value * factor, self.low * factor, self.high * factor)

    def to_json(self) -> Any:
        """A number where there is no spread."""
        if self.low == self.value == self.high:
            return _plain(self.value)
        return {"value": _plain(self.value), "low": _plain(self.low), "high": _plain(self.high)}


_Rate = Annotated[Rate, Meta(description="a number above 0, or low, value and high in this order")]


@dataclass(frozen=True, slots=True)
class Processor:
    """What computes: a CPU with its RAM, or a GPU with a memory of its own.

    Args:
        name: Of the chip.
        memory: Bytes.
        bandwidth: Bytes per second read from that memory.
        gemm: (rows, FLOP/s) of rows times 16-bit weights in that memory, rows ascending; with few rows it
            shows the reading of the weights.
        layer_overhead: Seconds that a decoder layer takes however small it is: kernel launches, Python.
    """

    name: str
    memory: Count
    bandwidth: _Rate
    gemm: Annotated[
        tuple[tuple[Count, Positive], ...],
        Meta(min_length=1, description="pairs [rows, FLOP/s], the rows ascending, the rates above 0"),
    ]
    layer_overhead: Number

    @property
    def read_memory(self) -> bool:
        """Whether `bandwidth` can be that of a memory, and not of layers that take long for other reasons."""
        return self.bandwidth.value >= _SLOWEST_MEMORY

    def flops(self, rows: float) -> float:
        """FLOP/s for that many rows: a power law between two measured points, the nearest beyond them."""
        counts, rates = (np.log(column) for column in zip(*self.gemm, strict=True))
        return math.exp(np.interp(math.log(max(rows, 1.0)), counts, rates))

    def to_json(self) -> dict[str, Any]:
        """The object of a processor in a profile."""
        gemm = [[rows, _plain(rate)] for rows, rate in self.gemm]
        return {**asdict(self), "bandwidth": self.bandwidth.to_json(), "gemm": gemm}


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a machine from another, without its rates. ram and memory in bytes."""

    name: str
    ram: int
    processor: str
    memory: int
    apart: bool

    def fingerprint(self) -> str:
        """12 hex digits. Sizes count in whole GB: what a kernel keeps for itself changes with updates."""
        parts = (self.name, round(self.ram / _GB), self.processor, round(self.memory / _GB), self.apart)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Hardware:
    """The profile of a whole machine.

    Args:
        name: For plans.
        ram: Bytes.
        disk: Bytes per second, read past the page cache.
        link: Bytes per second from RAM to the processor's memory; None where the processor computes in RAM.
        processor: What computes.
        sources: Where the figures come from; empty where they were measured.
        host: The CPU with its RAM beside a processor that has memory of its own; None where it is not known,
            or is the processor.
    """

    name: str
    ram: Count
    disk: _Rate
    link: _Rate | None
    processor: Processor
    sources: Texts = ()
    host: Processor | None = None

    def fingerprint(self) -> str:
        """12 hex digits of what identifies the machine: names and sizes, not rates."""
        chip = self.processor
        return Identity(self.name, self.ram, chip.name, chip.memory, self.link is not None).fingerprint()

    def without_gpu(self) -> "Hardware":
        """The machine as its CPU alone computes, which must be known as `host`."""
        assert self.host is not None
        name = self.name.replace(self.processor.name, self.host.name)  # of a measured machine
        return replace(self, name=name, link=None, processor=self.host, host=None)

    def to_json(self) -> dict[str, Any]:
        """The object of a profile, which `from_json` reads."""
        values: dict[str, Any] = {
            "version": VERSION,
            **asdict(self),
            "disk": self.disk.to_json(),
            "link": self.link.to_json() if self.link else None,
            "processor": self.processor.to_json(),
            "sources": list(self.sources),
        }
        del values["host"]
        return values if self.host is None else values | {"host": self.host.to_json()}

    @classmethod
    def from_json(cls, found: object) -> "Hardware":
        """Raises ValueError, one line: the key, what it is, what it should be."""
        given = {"host": None, **without_version(found, "version", VERSION, "a hardware profile")}
        given |= {key: _rate(given[key]) for key in ("disk", "link") if key in given}
        for name in ("processor", "host"):
            chip = given.get(name)
            if isinstance(chip, dict) and "bandwidth" in chip:
                given[name] = {**chip, "bandwidth": _rate(chip["bandwidth"])}
        hardware = read(given, cls)
        require_ascending(hardware.processor.gemm, "processor.gemm")
        if hardware.host is not None:
            require_ascending(hardware.host.gemm, "host.gemm")
        return hardware

    def text(self) -> str:
        """The JSON, laid out to be edited."""
        return layout(self.to_json()) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """Raises OSError, and ValueError for a file that is no profile."""
        return cls.from_json(parse(path.read_text(encoding="utf-8")))


def preset_names() -> tuple[str, ...]:
    """Names of the machines that come with the package, in alphabetical order."""
    files = resources.files("offspec_planners").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def find_preset(name: str) -> str | None:
    """The preset that a name stands for, as people write it: "4090" and "NVIDIA RTX 4090" are "rtx-4090".

    A name may lack the maker, "rtx" and the amount of memory; the preset with the shortest name is taken.
    """
    wanted = _MAKERS.sub("", _SEPARATORS.sub("", name.lower()))
    for known in sorted(preset_names(), key=lambda known: (known != name, len(known))):
        whole = _SEPARATORS.sub("", known)
        names = {whole, _MEMORY.sub("", known).replace("-", "")}
        if wanted and wanted in names | {each.removeprefix("rtx") for each in names}:
            return known
    return None


def preset(name: str) -> Hardware:
    """A machine that comes with the package. Raises ValueError, which lists the names."""
    if name not in preset_names():
        raise ValueError(f"there is no preset {name!r}; there are: {', '.join(preset_names())}")
    file = resources.files("offspec_planners").joinpath("presets", f"{name}.json")
    return Hardware.from_json(parse(file.read_text(encoding="utf-8")))


def _rate(value: Any) -> Any:
    """What a file says of a rate, where that is one number as the rate without spread."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Rate.exactly(float(value)) if plain and 0 < value <= LARGEST else value


def _plain(value: float) -> int | float:
    """Without the `.0` that a person would not write."""
    return int(value) if value.is_integer() else value

"""Hardware profile of a machine: rates of its disk, link and processor, and their JSON.

A profile is measured (`measure`), loaded from a preset or written by hand; its readers make no difference.
Sizes are in bytes, rates per second.
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
    check_version,
    layout,
    parse,
    read,
    require_ascending,
)

VERSION = 1
_SLOWEST_MEMORY = 1e9  # bytes per second; a slower measurement cannot be memory bandwidth
_GB = 10**9
# Parts of preset names.
_SEPARATORS, _MAKERS, _MEMORY = re.compile(r"[\s_-]+"), re.compile(r"nvidia|geforce"), re.compile(r"-\d+gb\b")


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate per second, measured several times: median and extremes.

    For a published figure all three are equal.
    """

    value: Positive
    low: Positive
    high: Positive

    def __post_init__(self) -> None:
        if not self.low <= self.value <= self.high:
            raise ValueError("low, value and high of a rate must ascend")

    @classmethod
    def of(cls, readings: Sequence[float]) -> "Rate":
        """Summarize at least one reading."""
        return cls(statistics.median(readings), min(readings), max(readings))

    @classmethod
    def exactly(cls, value: float) -> "Rate":
        return cls(value, value, value)

    @property
    def spread(self) -> float:
        """Distance of the extremes as a share of the median."""
        return (self.high - self.low) / self.value

    def times(self, factor: float) -> "Rate":
        """Return the rate multiplied by a factor."""
        return Rate(self.value * factor, self.low * factor, self.high * factor)

    def to_json(self) -> Any:
        """Return a number if there is no spread, else the three values."""
        if self.low == self.value == self.high:
            return _plain(self.value)
        return {"value": _plain(self.value), "low": _plain(self.low), "high": _plain(self.high)}


_Rate = Annotated[Rate, Meta(description="a number above 0, or low, value and high in this order")]


@dataclass(frozen=True, slots=True)
class Processor:
    """Processor with its memory: a CPU with RAM, or a GPU with VRAM.

    Args:
        name: Name of the chip.
        memory: Bytes of memory.
        bandwidth: Bytes per second read from that memory.
        gemm: (rows, FLOP/s) of rows times 16-bit weights in that memory, rows ascending; with few rows this
            measures reading the weights.
        layer_overhead: Minimum seconds of a decoder layer of any size: kernel launches, Python.
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
        """Whether `bandwidth` is plausible for a memory, and not due to otherwise slow layers."""
        return self.bandwidth.value >= _SLOWEST_MEMORY

    def flops(self, rows: float) -> float:
        """Return FLOP/s at `rows` rows: a power law between measured points, constant beyond them."""
        counts, rates = (np.log(column) for column in zip(*self.gemm, strict=True))
        return math.exp(np.interp(math.log(max(rows, 1.0)), counts, rates))

    def to_json(self) -> dict[str, Any]:
        """Return the object of a processor in a profile."""
        gemm = [[rows, _plain(rate)] for rows, rate in self.gemm]
        return {**asdict(self), "bandwidth": self.bandwidth.to_json(), "gemm": gemm}


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a machine without its rates; ram and memory in bytes."""

    name: str
    ram: int
    processor: str
    memory: int
    has_own_memory: bool

    def fingerprint(self) -> str:
        """Return 12 hex digits. Sizes are rounded to GB, since kernel updates change the reserved memory."""
        parts = (
            self.name,
            round(self.ram / _GB),
            self.processor,
            round(self.memory / _GB),
            self.has_own_memory,
        )
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Hardware:
    """Profile of a whole machine.

    Args:
        name: Name shown in plans.
        ram: Bytes of RAM.
        disk: Bytes per second, read past the page cache.
        link: Bytes per second from RAM to the processor's memory; None if the processor computes in RAM.
        processor: Processor that computes the model.
        sources: Sources of the figures; empty if measured.
        host: CPU with its RAM next to a processor that has its own memory; None if unknown, or if the CPU is
            the processor.
    """

    name: str
    ram: Count
    disk: _Rate
    link: _Rate | None
    processor: Processor
    sources: Texts = ()
    host: Processor | None = None

    def fingerprint(self) -> str:
        """12 hex digits that identify the machine, from names and sizes, not rates."""
        chip = self.processor
        return Identity(self.name, self.ram, chip.name, chip.memory, self.link is not None).fingerprint()

    def without_gpu(self) -> "Hardware":
        """Return the machine with only its CPU, which must be known as `host`."""
        assert self.host is not None
        name = self.name.replace(self.processor.name, self.host.name)  # names of measured machines contain it
        return replace(self, name=name, link=None, processor=self.host, host=None)

    def to_json(self) -> dict[str, Any]:
        """Return the object of a profile, which `from_json` reads."""
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
        """Load a profile. Raises ValueError in one line: the key, its value, the expected value."""
        given = {"host": None, **check_version(found, "version", VERSION, "a hardware profile")}
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
        """Return the JSON, formatted for editing."""
        return layout(self.to_json()) + "\n"

    @classmethod
    def load(cls, path: Path) -> "Hardware":
        """Load a file. Raises OSError, and ValueError if the file is not a profile."""
        return cls.from_json(parse(path.read_text(encoding="utf-8")))


def preset_names() -> tuple[str, ...]:
    """Return the names of the bundled machines, in alphabetical order."""
    files = resources.files("offspec_planners").joinpath("presets").iterdir()
    return tuple(sorted(file.name.removesuffix(".json") for file in files if file.name.endswith(".json")))


def find_preset(name: str) -> str | None:
    """Return the preset for a name as users type it: "4090" and "NVIDIA RTX 4090" are "rtx-4090".

    A name may omit the maker, "rtx" and the amount of memory; the preset with the shortest name is chosen.
    """
    wanted = _MAKERS.sub("", _SEPARATORS.sub("", name.lower()))
    for known in sorted(preset_names(), key=lambda known: (known != name, len(known))):
        whole = _SEPARATORS.sub("", known)
        names = {whole, _MEMORY.sub("", known).replace("-", "")}
        if wanted and wanted in names | {each.removeprefix("rtx") for each in names}:
            return known
    return None


def preset(name: str) -> Hardware:
    """Return a bundled machine. Raises ValueError, which lists the names."""
    if name not in preset_names():
        raise ValueError(f"unknown preset {name!r}; available: {', '.join(preset_names())}")
    file = resources.files("offspec_planners").joinpath("presets", f"{name}.json")
    return Hardware.from_json(parse(file.read_text(encoding="utf-8")))


def _rate(value: Any) -> Any:
    """Convert a plain number in a file to a rate without spread."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return Rate.exactly(float(value)) if plain and 0 < value <= LARGEST else value


def _plain(value: float) -> int | float:
    """Drop a trailing `.0`, which nobody would write by hand."""
    return int(value) if value.is_integer() else value

"""The steps in order of value: what comes late is left out when time runs short."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_day.day import Day


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the day, run in a process of its own.

    Args:
        call: "a" or "b": in which of the two calls it runs.
        seconds: Limit, after which it is stopped.
        work: module:function, below `bench.gpu_day`.
        simulated: Whether a dry run has a simulated GPU for it, instead of the CPU.
    """

    call: str
    seconds: int
    work: str
    simulated: bool = False

    def load(self) -> Callable[[Day], None]:
        module, function = self.work.split(":")
        found: Callable[[Day], None] = getattr(importlib.import_module(f"bench.gpu_day.{module}"), function)
        return found


STEPS = {
    "facts": Step("a", 25, "machine:facts"),
    "link": Step("a", 30, "link:measure", simulated=True),
    "products": Step("a", 50, "products:measure"),
    "tiles": Step("a", 40, "tiles:measure"),
    "exact": Step("a", 90, "exact:measure"),
    "doctor": Step("a", 45, "programs:doctor"),
    "tests": Step("a", 120, "programs:tests"),
    "host": Step("a", 45, "host:measure", simulated=True),
    "kernels": Step("a", 60, "programs:kernels"),
    "dequant": Step("a", 30, "programs:dequant"),
    "text": Step("b", 90, "text:measure", simulated=True),
    "wide": Step("b", 120, "wide:measure", simulated=True),
    "large": Step("b", 110, "large:measure", simulated=True),
    "peer": Step("b", 60, "peer:measure"),
}

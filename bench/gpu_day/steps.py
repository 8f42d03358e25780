"""Steps in order of value: later steps are skipped if time runs out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.gpu_day.step_context import StepContext


@dataclass(frozen=True, slots=True)
class Step:
    """A step, run in a separate process.

    Args:
        call: "a" or "b": the call in which it runs.
        seconds: Time limit.
        work: module:function, below `bench.gpu_day`.
        simulated: Whether a dry run uses a simulated GPU for it, instead of the CPU.
    """

    call: str
    seconds: int
    work: str
    simulated: bool = False

    def load(self) -> Callable[[StepContext], None]:
        module, function = self.work.split(":")
        found: Callable[[StepContext], None] = getattr(
            importlib.import_module(f"bench.gpu_day.{module}"), function
        )
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

"""The lines under the two answers of `offspec demo`: speeds, what bound each, and what they stand for."""

import os
import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from offspec.checkpoint.open import DEMO_WIDE
from offspec.core.config import EngineConfig
from offspec.core.errors import OffspecError
from offspec.core.events import Event, PassStats, Result
from offspec.ui.cli.demo_view import Run
from offspec.ui.cli.output import Output
from offspec.ui.told import told
from offspec_planners.units import format_bytes

_DRAFT = "Qwen/Qwen3-0.6B"
_LARGER = {"Qwen/Qwen3-8B": 16.4e9, "Qwen/Qwen3-14B": 29.5e9, "Qwen/Qwen3-32B": 65.5e9}  # bytes
_WAITED = 0.2  # share of the time without a processor from which on others are called busy
_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns on a processor, ns of waiting for one, times

_COST = (
    "The cost is real: each pass reads and computes 1.9 B parameters. The acceptance is that of a small "
    "pair: the model gives the text of its own draft, so more draft tokens are accepted than between two "
    "models that were trained apart."
)


@dataclass(slots=True)
class Processors:
    """Whether other processes keep the processors busy. Made before the first answer."""

    load: float
    _waited: float

    @classmethod
    def now(cls) -> "Processors":
        """Before this process has computed anything, so that the load is that of others."""
        return cls(os.getloadavg()[0], _waiting())

    def busy(self, seconds: float) -> str:
        """A sentence if other processes were busy; "" if not. seconds: of both answers."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        waited = (_waiting() - self._waited) / max(seconds, 1e-9)
        if self.load <= cores and waited < _WAITED:
            return ""
        load = max(self.load, os.getloadavg()[0])
        return (
            f"Other processes are busy (load average {load:.1f} on {cores} cores), which slows trees and "
            "drafts more than passes of one token: run it again when they are done."
        )


def _waiting() -> float:
    """Seconds that this thread has waited for a processor; 0 if unknown."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def summary(alone: Run, drafted: Run, config: EngineConfig, processors: Processors) -> list[str]:
    """The two speeds, what bound them, and what they were measured on."""
    first, second = alone.result, drafted.result
    assert first is not None and second is not None
    ratio = second.tok_per_s / first.tok_per_s
    return [
        "",
        *(_line(run, run.result) for run in (alone, drafted) if run.result is not None),
        "",
        f"{ratio:.1f} times the speed, {_same(first, second)}. {_setting(first, second, config)}",
        *_partly(first, second),
        *_why(ratio, drafted.passes, second, processors.busy(first.seconds + second.seconds)),
        *([_COST] if config.model == DEMO_WIDE else []),
    ]


def _line(run: Run, result: Result) -> str:
    each = f", {result.tokens_per_pass:.1f} tokens per pass" if result.tokens > result.passes else ""
    return (
        f"{run.title:<20}{result.tok_per_s:6.2f} tok/s: {result.tokens} tokens in {result.passes} passes"
        f"{each}; {_bound(run.passes, result)}"
    )


def _bound(passes: list[PassStats], result: Result) -> str:
    """The largest part of the time of all passes."""
    link = "the disk" if result.bytes_read else "PCIe"
    parts = {
        f"bound by {link}": sum(stats.wait_seconds for stats in passes),
        "bound by the draft": sum(stats.draft_seconds for stats in passes),
        "bound by computing": sum(stats.target_seconds - stats.wait_seconds for stats in passes),
    }
    most = max(parts, key=lambda part: parts[part])
    return f"{most} ({parts[most] / max(sum(parts.values()), 1e-9):.0%} of the time)"


def _same(first: Result, second: Result) -> str:
    """Whether the answers agree as far as the shorter one goes."""
    common = min(first.tokens, second.tokens)
    same = first.token_ids[:common] == second.token_ids[:common]
    if not same:
        return "texts that differ in their rounding"
    return "the same text" if first.tokens == second.tokens else f"the same {common} tokens"


def _setting(first: Result, second: Result, config: EngineConfig) -> str:
    read = max(result.bytes_read / max(result.passes, 1) for result in (first, second))
    moved = max(result.bytes_streamed / max(result.passes, 1) for result in (first, second))
    streamed = f"{format_bytes(int(read or moved))} from {'disk' if read else 'RAM'} in each pass"
    return f"Memory limit {format_bytes(config.memory or 0)}, {streamed if moved else 'all of it in memory'}."


def _partly(first: Result, second: Result) -> list[str]:
    """Said if the first answer was stopped early."""
    if first.finish_reason != "halted":
        return []
    return [f"Without speculation {first.tokens} tokens were generated, to measure the rate."]


def _why(ratio: float, passes: list[PassStats], result: Result, busy: str) -> list[str]:
    """Why drafting was paused, or slower, if it was."""
    lines = []
    paused = sum(stats.paused for stats in passes)
    if paused:
        lines.append(
            f"Drafting was paused in {paused} of {result.passes} passes, to find out whether it pays or "
            "because it did not."
        )
    if busy:
        lines.append(busy)
    elif ratio < 1 and not result.bytes_streamed:
        lines.append("Nothing is streamed, so a pass costs little and trees gain little.")
    elif ratio < 1:
        lines.append("For this prompt drafting cost more than it gained.")
    return lines


def wrapped(line: str, out: Output) -> str:
    """The line with breaks between words in a terminal; whole in a file, so that it can be searched."""
    if not out.is_terminal:
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def larger(notify: Callable[[Event], None]) -> str:
    """A line on a model that does not fit in this machine's memory, by a plan."""
    from offspec.plan.hardware_profile import profile
    from offspec.plan.other_hardware import plan_for_hardware

    try:
        hardware = profile("cpu", notify).hardware
        model = next((name for name, size in _LARGER.items() if size > hardware.ram), list(_LARGER)[-1])
        plan = plan_for_hardware(EngineConfig(model, draft=_DRAFT), hardware)
    except OffspecError as error:
        return f"What a larger model would do here cannot be predicted: {told(error)}"
    fast, slow = plan.forecast.tok_per_s, plan.tok_per_s_alone
    speeds = f"about {fast:.2g} tokens per second, {slow:.2g} without speculation"
    return (
        f"{model} ({_LARGER[model] / 1e9:.0f} GB) on this machine with {hardware.ram / 1e9:.0f} GB of RAM, "
        f"predicted: {speeds}; `offspec plan {model}` says why, and what would help"
    )

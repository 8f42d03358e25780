"""Summary of `offspec demo`: speeds, bottlenecks, and how to read them."""

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
from offspec.ui.cli.output import StdoutWriter
from offspec.ui.messages import user_message
from offspec_planners.units import format_bytes

_DRAFT = "Qwen/Qwen3-0.6B"
_LARGER = {"Qwen/Qwen3-8B": 16.4e9, "Qwen/Qwen3-14B": 29.5e9, "Qwen/Qwen3-32B": 65.5e9}  # bytes
_WAITED = 0.2  # fraction of the time spent waiting for a CPU that counts as a busy machine
_SCHEDULED = Path("/proc/thread-self/schedstat")  # ns running, ns waiting for a CPU, number of time slices

_COST = (
    "The cost is real: each pass reads and computes 1.9 B parameters. The acceptance rate is that of a small "
    "pair: the model generates the text of its own draft, so more draft tokens are accepted than between two "
    "independently trained models."
)


@dataclass(slots=True)
class CpuLoad:
    """CPU load by other processes. Created before the first answer."""

    load: float
    _waited: float

    @classmethod
    def measure(cls) -> "CpuLoad":
        """Measure the load of other processes, before this one computes anything."""
        return cls(os.getloadavg()[0], _runqueue_wait_s())

    def busy_note(self, seconds: float) -> str:
        """Return a sentence if other processes were busy, else "". seconds: time of both answers."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        waited = (_runqueue_wait_s() - self._waited) / max(seconds, 1e-9)
        if self.load <= cores and waited < _WAITED:
            return ""
        load = max(self.load, os.getloadavg()[0])
        return (
            f"Other processes are busy (load average {load:.1f} on {cores} cores), which slows trees and "
            "drafts more than passes of one token: run it again when the machine is idle."
        )


def _runqueue_wait_s() -> float:
    """Return the seconds that this thread has waited for a CPU; 0 if unknown."""
    try:
        return int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def summary(alone: Run, drafted: Run, config: EngineConfig, processors: CpuLoad) -> list[str]:
    """Return lines on both speeds, their bottlenecks, and the settings."""
    first, second = alone.result, drafted.result
    assert first is not None and second is not None
    ratio = second.tok_per_s / first.tok_per_s
    return [
        "",
        *(_line(run, run.result) for run in (alone, drafted) if run.result is not None),
        "",
        f"{ratio:.1f} times the speed, {_same(first, second)}. {_setting(first, second, config)}",
        *_partly(first, second),
        *_slowdown_reason(
            ratio, drafted.passes, second, processors.busy_note(first.seconds + second.seconds)
        ),
        *([_COST] if config.model == DEMO_WIDE else []),
    ]


def _line(run: Run, result: Result) -> str:
    each = f", {result.tokens_per_pass:.1f} tokens per pass" if result.tokens > result.passes else ""
    return (
        f"{run.title:<20}{result.tok_per_s:6.2f} tok/s: {result.tokens} tokens in {result.passes} passes"
        f"{each}; {_bottleneck(run.passes, result)}"
    )


def _bottleneck(passes: list[PassStats], result: Result) -> str:
    """Return the largest part of the time of all passes."""
    link = "the disk" if result.bytes_read else "PCIe"
    parts = {
        f"bound by {link}": sum(stats.wait_seconds for stats in passes),
        "bound by drafting": sum(stats.draft_seconds for stats in passes),
        "bound by compute": sum(stats.target_seconds - stats.wait_seconds for stats in passes),
    }
    most = max(parts, key=lambda part: parts[part])
    return f"{most} ({parts[most] / max(sum(parts.values()), 1e-9):.0%} of the time)"


def _same(first: Result, second: Result) -> str:
    """Compare the answers up to the length of the shorter one."""
    common = min(first.tokens, second.tokens)
    same = first.token_ids[:common] == second.token_ids[:common]
    if not same:
        return "different text (this is a bug: please report it)"
    return "the same text" if first.tokens == second.tokens else f"the same {common} tokens"


def _setting(first: Result, second: Result, config: EngineConfig) -> str:
    read = max(result.bytes_read / max(result.passes, 1) for result in (first, second))
    moved = max(result.bytes_streamed / max(result.passes, 1) for result in (first, second))
    streamed = f"{format_bytes(int(read or moved))} from {'disk' if read else 'RAM'} in each pass"
    return (
        f"Memory limit {format_bytes(config.memory or 0)}, {streamed if moved else 'all weights in memory'}."
    )


def _partly(first: Result, second: Result) -> list[str]:
    """Return a line if the first answer was stopped early."""
    if first.finish_reason != "halted":
        return []
    return [f"Without speculation, only {first.tokens} tokens were generated, to measure the rate."]


def _slowdown_reason(ratio: float, passes: list[PassStats], result: Result, busy: str) -> list[str]:
    """Explain why drafting was paused or slower, if it was."""
    lines = []
    paused = sum(stats.paused for stats in passes)
    if paused:
        lines.append(
            f"Drafting was paused in {paused} of {result.passes} passes, either because it was slower or to "
            "measure whether it is."
        )
    if busy:
        lines.append(busy)
    elif ratio < 1 and not result.bytes_streamed:
        lines.append("No weights are streamed, so a pass costs little and trees gain little.")
    elif ratio < 1:
        lines.append("For this prompt, drafting cost more time than it saved.")
    return lines


def wrapped(line: str, out: StdoutWriter) -> str:
    """Wrap the line on a terminal; keep it whole in a file, so that it can be searched."""
    if not out.is_terminal:
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)


def larger_model_line(notify: Callable[[Event], None]) -> str:
    """Return a prediction for a model that does not fit in this machine's memory."""
    from offspec.plan.hardware_profile import profile
    from offspec.plan.other_hardware import plan_for_hardware

    try:
        hardware = profile("cpu", notify).hardware
        model = next((name for name, size in _LARGER.items() if size > hardware.ram), list(_LARGER)[-1])
        plan = plan_for_hardware(EngineConfig(model, draft=_DRAFT), hardware)
    except OffspecError as error:
        return f"The speed of a larger model cannot be predicted: {user_message(error)}"
    fast, slow = plan.forecast.tok_per_s, plan.tok_per_s_alone
    speeds = f"about {fast:.2g} tokens per second, {slow:.2g} without speculation"
    return (
        f"{model} ({_LARGER[model] / 1e9:.0f} GB) on this machine with {hardware.ram / 1e9:.0f} GB of RAM, "
        f"predicted: {speeds}; `offspec plan {model}` shows the reasons and possible improvements"
    )

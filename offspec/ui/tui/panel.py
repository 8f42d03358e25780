"""Side panel: speed, time per part of a pass, and placement.

No line is wider than the panel. Bars use different characters, so that they are readable without colour.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from offspec.core.events import LoadProgress
from offspec.ui.tui.cached_text import CachedText
from offspec_planners.units import format_bytes, format_count, format_number, format_seconds

if TYPE_CHECKING:
    from offspec.chat.conversation import Conversation
    from offspec.core.config import EngineConfig
    from offspec.ui.chat.controller import ChatController
    from offspec.ui.chat.setup import ChatEngine
    from offspec.ui.chat.stats import ChatStats, PassTimes
    from offspec_planners.plan import Plan

Sections = Mapping[str, Content]

WIDTH = 30  # columns
_STEPS = "▁▂▃▄▅▆▇█"
# Parts of a pass: name, character in the bar, colour.
_SPLIT = (
    ("draft", "▓", "$text-warning"),
    ("link", "░", "$text-primary"),
    ("compute", "█", "$text-success"),
)
_NOTHING = Content.styled("no data yet", "$foreground 60%")

_SECTIONS = {
    "speed": "Speed",
    "split": "Last pass",
    "spark": "Tokens per pass",
    "memory": "Memory",
    "plan": "Plan",
    "session": "Session",
}


def speed(stats: "ChatStats") -> Content:
    """Return tokens per second, tokens per pass, and with on-demand loading the cache hit rate of experts."""
    if not stats.history:
        return _NOTHING
    shown = [
        f"{format_number(stats.tok_per_s)} tok/s",
        f"{format_number(stats.tokens_per_pass)} tokens per pass",
    ]
    if asked := stats.answer.experts_requested:
        shown.append(f"{1 - stats.answer.experts_read / asked:.0%} of experts in memory")
    return _lines(*shown)


def times(done: "PassTimes") -> Content:
    """Return the time of each part of a pass as a bar with legend."""
    total = sum(done)
    if total <= 0:
        return _NOTHING
    bar, rows, filled, passed = [], [], 0, 0.0
    for (name, sign, style), part in zip(_SPLIT, done, strict=True):
        passed += part
        end = round(passed / total * WIDTH)
        bar.append((sign * (end - filled), style))
        filled = end
        share = f"{part / total:.0%}"
        rows.append(Content.assemble((sign, style), f" {name:<8}{format_seconds(part):>11}", f"{share:>9}"))
    return _lines(Content.assemble(*bar), *rows)


def last_pass(stats: "ChatStats") -> Content:
    """Return the time of each part of the last pass, and how many of its experts were read."""
    shown = times(stats.last_times)
    asked, read = stats.last_experts
    return _lines(shown, f"{read:,} of {asked:,} experts read") if asked else shown


def sparkline(emitted: Sequence[int]) -> Content:
    """Return the tokens of the latest passes as a sparkline with their range; the last is at the right."""
    if not emitted:
        return _NOTHING
    shown = list(emitted)[-WIDTH:]
    top = max(*shown, 1)
    columns = "".join(_STEPS[max(round(count / top * len(_STEPS)), 1) - 1] for count in shown)
    return _lines(Content.styled(columns, "$text-success"), f"{min(shown)} to {max(shown)}, last {shown[-1]}")


def memory(engine: "ChatEngine") -> Content:
    """Return the GPU and the use of each memory. Without a plan, only layers and limits are known."""
    placement, plan = engine.placement, engine.plan
    resident, host = placement["resident_layers"], placement["cpu_layers"] + placement["host_layers"]
    slots, behind = placement["expert_slots"], placement["host_expert_slots"]
    tiers = [("RAM", (resident + host, slots), placement["memory"])]
    if placement["vram"] is not None:
        tiers = [
            ("VRAM", (resident, slots), placement["vram"]),
            ("RAM", (host, behind), placement["memory"]),
        ]
    tiers.append(("disk", (placement["disk_layers"], placement["experts"] if slots else 0), None))
    return _lines(
        _gpu(placement["gpu_names"]),
        *(line for name, counts, limit in tiers for line in _tier(name, *counts, limit, _held(plan, name))),
    )


def _gpu(names: Sequence[str]) -> str:
    """Return the GPU that computes, without its maker, or that there is none."""
    cards = [name.removeprefix("NVIDIA ") for name in names]
    if not cards:
        return "GPU  none (runs on the CPU)"
    return f"GPU  {cards[0]}" if len(cards) == 1 else f"GPU  {len(cards)}, first {cards[0]}"


def _tier(name: str, layers: int, experts: int, limit: int | None, held: int | None) -> list[Content | str]:
    counts = [(layers, "layer"), (experts, "expert")] if layers or not experts else [(experts, "expert")]
    count = ", ".join(format_count(n, of) for n, of in counts if n or of == "layer")
    if limit is None:
        size = "" if not held else f", {format_bytes(held)}"
        return [f"{name:<5}{count}{size}"]
    if held is None:
        return [f"{name:<5}{count}, limit {format_bytes(limit)}"]
    sizes = f"{name:<5}{format_bytes(held)} of {format_bytes(limit)}"
    return [sizes, bar(held / limit), f"     {count}"]


def _held(plan: "Plan | None", memory_name: str) -> int | None:
    if plan is None:
        return None
    return sum(part.bytes for part in plan.parts if plan.memory_name(part.tier) == memory_name)


def plan_line(engine: "ChatEngine") -> Content:
    """Return the size of trees and the expected speed."""
    several = f"≤ {engine.budget:,} nodes, width {engine.width:,}"
    trees = several if engine.budget > 1 else "one token per pass"
    if engine.plan is None:
        return _lines(trees)
    forecast = engine.plan.forecast
    expected = f"{format_number(forecast.tok_per_s)} tok/s expected"
    bound = f"{format_seconds(forecast.seconds_per_pass)}/pass, {forecast.bound}-bound"
    return _lines(trees, expected, bound)


def session(controller: "ChatController") -> Content:
    """Return the title of the conversation and the use of the context."""
    talk, used, room = controller.session.conversation, controller.session.used, controller.session.context
    turns = format_count(talk.turns, "question")
    return _lines(
        talk.title or "a new conversation", turns, f"{used:,} of {room:,} tokens", bar(used / max(room, 1))
    )


def bar(share: float) -> Content:
    """Return a bar that is filled to a share from 0 to 1. Any share above 0 fills at least one cell."""
    full = min(max(round(share * WIDTH), 1 if share > 0 else 0), WIDTH)
    return Content.assemble(("▰" * full, "$text-primary"), ("▱" * (WIDTH - full), "$foreground 30%"))


def _lines(*lines: Content | str) -> Content:
    return Content("\n").join(lines)


def loading(config: "EngineConfig", event: LoadProgress | None, resumed: "Conversation | None") -> Sections:
    """Return the sections before there is an engine: requested settings and loading progress."""
    limits = [
        f"{name:<5}{'free memory' if limit is None else f'limit {format_bytes(limit)}'}"
        for name, limit in (("RAM", config.memory), ("VRAM", config.vram))
        if name == "RAM" or limit is not None
    ]
    stage: list[Content | str] = []
    if event is not None:
        stage = [event.stage, bar(event.done / event.total)] if event.total else [event.stage]
    trees = "trees by the plan" if config.budget is None else f"≤ {config.budget:,} nodes"
    title = resumed.title if resumed is not None and resumed.title else "a new conversation"
    turns = 0 if resumed is None else resumed.turns
    return {
        **dict.fromkeys(("speed", "split", "spark"), _NOTHING),
        "memory": _lines(*limits, *stage),
        "plan": _lines(f"draft {config.draft}", trees),
        "session": _lines(title, format_count(turns, "question")),
    }


class SidePanel(VerticalScroll, can_focus=False):
    """Statistics of the chat. Lines are truncated, so that the height is the number of lines."""

    def __init__(self) -> None:
        super().__init__()
        # Engine whose memory and plan are shown: a weak reference, to let a closed model be freed.
        self._engine: weakref.ref[ChatEngine] | None = None

    def compose(self) -> ComposeResult:
        for name, title in _SECTIONS.items():
            yield Static(title, classes="panel-title", markup=False)
            yield CachedText(id=f"panel-{name}")

    def update_while_loading(
        self, config: "EngineConfig", event: LoadProgress | None, resumed: "Conversation | None"
    ) -> None:
        """Show settings and progress before there is a controller."""
        if self.display and self.is_mounted:
            self._show(loading(config, event, resumed))

    def update_from(self, controller: "ChatController") -> None:
        """Show the current state of the controller."""
        if not self.display or not self.is_mounted:
            return
        shown = {
            "speed": speed(controller.stats),
            "split": last_pass(controller.stats),
            "spark": sparkline(controller.stats.history),
            "session": session(controller),
        }
        if self._engine is None or self._engine() is not controller.engine:
            self._engine = weakref.ref(controller.engine)
            shown["memory"] = memory(controller.engine)
            shown["plan"] = plan_line(controller.engine)
        self._show(shown)

    def _show(self, shown: Sections) -> None:
        for name, content in shown.items():
            self.query_one(f"#panel-{name}", CachedText).show(content)

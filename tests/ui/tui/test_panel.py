"""The side panel: the source of its figures, and that it repaints only changes."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from textual.app import App, ComposeResult
from textual.content import Content
from textual.widgets import Static

from offspec.chat.conversation import Conversation
from offspec.core.config import EngineConfig
from offspec.core.events import PassStats
from offspec.ui.chat.stats import ChatStats, PassTimes
from offspec.ui.tui import panel, themes
from offspec.ui.tui.panel import WIDTH, SidePanel
from offspec_planners.plan import Plan
from tests.support.fake_engine import ScriptedEngine
from tests.support.sample_plans import large, small


@dataclass
class Talk:
    conversation: Conversation
    used: int = 0
    context: int = 4096


@dataclass
class Table:
    """The part of a chat that the panel uses."""

    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(layers=30))
    stats: ChatStats = field(default_factory=ChatStats)
    session: Talk = field(default_factory=lambda: Talk(Conversation(model="demo")))


def passed(emitted: int, index: int = 1) -> PassStats:
    return PassStats(index, 64, 8, 6, emitted, 0.2, 0.8, 10**9, wait_seconds=0.6, compute_seconds=0.15)


def lines(content: Content) -> list[str]:
    return content.plain.split("\n")


def test_speed_and_sparkline_of_the_answer() -> None:
    for content in (panel.speed(ChatStats()), panel.times(PassTimes()), panel.sparkline(())):
        assert content.plain == "no data yet"
    stats = ChatStats()
    stats.on_event(passed(4))
    stats.on_event(passed(8))
    assert lines(panel.speed(stats)) == ["6.00 tok/s", "6.00 tokens per pass"]
    assert lines(panel.sparkline((1, 4, 8))) == ["▁▄█", "1 to 8, last 8"]
    assert len(lines(panel.sparkline(range(1, 100)))[0]) == WIDTH


def test_expert_reads_are_shown_for_on_demand_experts() -> None:
    stats = ChatStats()
    stats.on_event(passed(4))
    assert panel.last_pass(stats) == panel.times(stats.last_times)
    stats.on_event(replace(passed(4), experts_asked=75, experts_read=12))
    stats.on_event(replace(passed(4), experts_asked=25, experts_read=13))
    assert lines(panel.last_pass(stats))[-1] == "13 of 25 experts read"
    assert lines(panel.speed(stats))[-1] == "75% of experts in memory"


def test_time_split_fills_the_panel_and_has_a_legend() -> None:
    shown = lines(panel.times(PassTimes(draft=0.2, link=0.6, compute=0.2)))
    assert shown[0] == "▓" * 6 + "░" * 18 + "█" * 6
    assert [line.split() for line in shown[1:]] == [
        ["▓", "draft", "0.200", "s", "20%"],
        ["░", "link", "0.600", "s", "60%"],
        ["█", "compute", "0.200", "s", "20%"],
    ]
    for split in (
        PassTimes(1.0),
        PassTimes(link=1e-6),
        PassTimes(1 / 3, 1 / 3, 1 / 3),
        PassTimes(0.1, 40.0, 0.1),
    ):
        assert len(lines(panel.times(split))[0]) == WIDTH


class PlacedEngine(ScriptedEngine):
    """An engine with a given placement."""

    def __init__(self, plan: Plan | None = None, **placed: object) -> None:
        super().__init__(layers=30, plan=plan)
        self.placed = placed

    @property
    def placement(self) -> dict[str, object]:
        return {**super().placement, **self.placed}


def test_contents_of_each_memory() -> None:
    assert lines(panel.memory(PlacedEngine())) == [
        "GPU  none (runs on the CPU)",
        "RAM  7 layers, limit 1.50 GB",
        "disk 23 layers",
    ]
    shown = lines(panel.memory(PlacedEngine(small())))
    assert shown[1] == "RAM  2.68 GB of 1.50 GB"  # the scripted engine's limit is below the plan's need
    assert shown[2] == "▰" * WIDTH
    assert shown[-1] == "disk 23 layers, 2.71 GB"
    shown = lines(panel.memory(PlacedEngine(small(), disk_layers=0, expert_slots=261, experts=1920)))
    assert shown[3] == "     7 layers, 261 experts"
    assert shown[-1] == "disk 1,920 experts, 2.71 GB"
    layers = {"resident_layers": 5, "host_layers": 25, "disk_layers": 50}
    limits = {"memory": 60 * 10**9, "vram": 22 * 10**9}
    engine = PlacedEngine(large(), **layers, **limits, gpu_names=["NVIDIA GeForce RTX 4090"])
    shown = lines(panel.memory(engine))
    assert shown[:2] == ["GPU  GeForce RTX 4090", "VRAM 18.60 GB of 22.00 GB"]
    assert shown[3:5] == ["     5 layers", "RAM  50.04 GB of 60.00 GB"]
    assert shown[-1] == "disk 50 layers, 85.60 GB"
    engine.placed["gpu_names"] = ["NVIDIA L4", "NVIDIA L4"]
    assert lines(panel.memory(engine))[0] == "GPU  2, first L4"


def test_plan_section() -> None:
    assert lines(panel.plan_line(ScriptedEngine())) == ["≤ 64 nodes, width 8"]
    alone = ScriptedEngine(config=EngineConfig("demo", draft="none", budget=1))
    assert lines(panel.plan_line(alone)) == ["one token per pass"]
    with_plan = lines(panel.plan_line(ScriptedEngine(plan=small())))
    assert with_plan[1].endswith("tok/s expected")
    assert with_plan[2].endswith("-bound")


def test_context_is_shown_in_figures_and_as_a_bar() -> None:
    table = Table()
    table.session.used = 1024
    shown = lines(panel.session(table))
    assert shown[:3] == ["a new conversation", "0 questions", "1,024 of 4,096 tokens"]
    assert shown[3].count("▰") == round(WIDTH / 4)
    assert panel.bar(1e-9).plain.startswith("▰▱")
    assert panel.bar(2.0).plain == "▰" * WIDTH


class Host(App[None]):
    CSS_PATH = "../../../offspec/ui/tui/panel.tcss"

    def __init__(self) -> None:
        super().__init__()
        self.panel = SidePanel()

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_mount(self) -> None:
        themes.register(self)


async def test_only_changes_are_repainted(monkeypatch: pytest.MonkeyPatch) -> None:
    app, table = Host(), Table()
    async with app.run_test(size=(34, 40)) as pilot:
        app.panel.update_from(table)
        await pilot.pause()
        updated: list[str | None] = []
        update = Static.update

        def noted(section: Static, *given: Any, **more: Any) -> None:
            updated.append(section.id)
            update(section, *given, **more)

        monkeypatch.setattr(Static, "update", noted)
        app.panel.update_from(table)
        assert updated == []
        table.session.used = 2048
        app.panel.update_from(table)
        assert updated == ["panel-session"]
        table.stats.on_event(passed(4))
        app.panel.update_from(table)
        assert updated[1:] == ["panel-speed", "panel-split", "panel-spark"]
        app.panel.display = False
        app.panel.update_from(None)  # a hidden panel does no work


async def test_constant_engine_data_is_read_once_per_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[ScriptedEngine] = []
    memory = panel.memory

    def noted(engine: ScriptedEngine) -> Content:
        read.append(engine)
        return memory(engine)

    monkeypatch.setattr(panel, "memory", noted)
    app, table = Host(), Table()
    async with app.run_test(size=(34, 40)):
        for emitted in (1, 2, 3):
            table.stats.on_event(passed(emitted))
            app.panel.update_from(table)
        assert read == [table.engine]
        table.engine = ScriptedEngine(layers=9)
        app.panel.update_from(table)
        assert read[1:] == [table.engine]
        assert "disk 7 layers" in str(app.panel.query_one("#panel-memory", Static).visual)

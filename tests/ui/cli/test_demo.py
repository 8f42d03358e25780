"""`offspec demo`: two runs of a scripted engine, side by side or one after the other."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from offspec.core.config import EngineConfig
from offspec.core.errors import CapacityError, DiskFullError, PlanError
from offspec.core.events import Event, LoadProgress, PassProgress
from offspec.plan import hardware_profile, other_hardware
from offspec.ui.cli import demo, demo_summary, demo_view
from tests.support.fake_engine import Script, ScriptedEngine, ScriptedLoad, plausible_tree
from tests.support.sample_plans import LAPTOP, large
from tests.ui.cli.program import TEXT

Call = Callable[..., Result]
LINE = "A larger model would do."
LONG = "".join(f"word{number} " for number in range(40))


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "larger_model_line", lambda notify: LINE)


@pytest.mark.usefixtures("larger")
def test_both_runs_and_their_speeds_are_shown(offspec: Call, load: ScriptedLoad) -> None:
    result = offspec("demo", "Why?", "--max-tokens", "50")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:4] == ["one token per pass:", TEXT, "with speculation:", TEXT]
    assert [line.split("  ")[0] for line in lines[5:7]] == ["one token per pass", "with speculation"]
    assert all("tok/s: " in line and "bound by compute (50% of the time)" in line for line in lines[5:7])
    assert lines[8].startswith("1.0 times the speed, the same text. Memory limit 1.50 GB, ")
    assert "1.9 B parameters" in lines[-2] and "that of a small pair" in lines[-2]
    assert lines[-1] == LINE
    assert [(config.model, config.draft, config.draft_bits, config.memory) for config, _ in load.calls] == [
        ("demo-wide", "none", None, 1_500_000_000),
        ("demo-wide", "demo", 4, 1_500_000_000),
    ]
    assert [config.device for config, _ in load.calls] == ["cpu", "cpu"], "it streams even if there is a GPU"
    assert all(config.budget for config, _ in load.calls), "nothing is measured before the first token"
    assert [engine.requests[-1].speculate for engine in load.engines] == [False, True]
    assert "O_DIRECT" in result.stderr, "notices are shown"
    assert result.stderr.startswith("The demo model, widened to 1.9 B parameters"), "it announces each run"


@pytest.mark.usefixtures("larger")
def test_run_without_speculation_measures_only_the_rate(
    offspec: Call, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.answers = [Script(LONG, pass_tokens=1)]
    monkeypatch.setattr(demo, "_ENOUGH_SECONDS", 0.0)
    lines = offspec("demo").stdout.splitlines()
    assert lines[1] == LONG[: LONG.index("word10")].rstrip() or lines[1] == LONG[: LONG.index("word10")]
    assert lines[3].rstrip() == LONG.rstrip(), "with speculation the answer is whole"
    text = "\n".join(lines)
    assert "the same 10 tokens" in text
    assert "Without speculation, only 10 tokens were generated, to measure the rate." in text


@pytest.mark.usefixtures("larger")
def test_other_model(offspec: Call, load: ScriptedLoad) -> None:
    result = offspec("demo", "--model", "demo")
    assert [(config.model, config.draft, config.memory) for config, _ in load.calls] == [
        ("demo", "none", 1_100_000_000),
        ("demo", "auto", 1_100_000_000),
    ]
    assert load.calls[1][0].budget is None, "its tree is planned"
    assert "1.9 B parameters" not in result.stdout + result.stderr


@pytest.mark.usefixtures("larger")
def test_small_memory_limit_is_raised_unless_given(
    offspec: Call, load: ScriptedLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[int]()

    def strict(config: Any, **given: Any) -> ScriptedEngine:
        limits.append(config.memory)
        if config.memory < 2_000_000_000:
            raise CapacityError("needs 2 GB", needed=2_000_000_000, given=config.memory)
        return load(config, **given)

    monkeypatch.setattr(sys.modules["offspec.engine.load"], "load", strict)
    assert offspec("demo").exit_code == 0
    assert limits == [1_500_000_000, 2_100_000_000, 2_100_000_000]
    limits.clear()
    assert offspec("demo", "--memory", "1GB").exit_code == 1
    assert limits == [1_000_000_000]
    load.fail = DiskFullError("demo-wide needs 3.9 GB: make room there")
    printed = offspec("demo").stderr.splitlines()[-1]
    assert printed.startswith(f"error: {load.fail}; or run `offspec demo --model demo`")
    monkeypatch.setattr(load, "fail", KeyboardInterrupt())
    result = offspec("demo")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (130, "stopped")


@pytest.mark.usefixtures("larger")
def test_messages_do_not_name_a_device_option(
    offspec: Call, load: ScriptedLoad, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offspec.plan.choose_device import choose_device

    def choosing(config: EngineConfig, *, notify: Callable[[Event], None]) -> ScriptedEngine:
        choose_device(config, notify)
        return load(config, notify=notify)

    monkeypatch.setattr(sys.modules["offspec.engine.load"], "load", choosing)
    printed = offspec("demo").stderr.splitlines()
    assert printed.count("Computes on the CPU: the demo uses no GPU") == 1
    assert not any("--device" in line for line in printed), "the demo has no such option"


def test_both_texts_bar_and_tree_are_drawn() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    runs = [demo_view.Run("alone", "one two " * 8, tokens=2), demo_view.Run("drafted")]
    runs[0].work = demo_view.ProgressState.in_pass(PassProgress(3, 128, 15, 30, 1_800_000_000, 0.5))
    runs[0].tree = plausible_tree(2, "Light", [" scatters", " in", " air"])
    console.print(demo_view.ColumnView(console, runs).drawn())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "alone" in lines[1] and "tok/s" in lines[1] and "drafted" in lines[1]
    assert lines[2].startswith("one two") and len(lines) > 3
    shown = "\n".join(lines)
    assert "pass 3 over 128 nodes: layer 15 of 30, 1.80 GB streamed" in shown
    assert "tree of pass 2: 9 nodes, 2 accepted" in shown and "★ ·air" in shown


def test_loading_is_reported_in_its_unit() -> None:
    work = demo_view.ProgressState.loading(LoadProgress("writing demo-wide", 1_930_000_000, 3_860_000_000))
    assert (work.text, work.done) == ("writing demo-wide: 1.93 GB of 3.86 GB", 0.5)
    assert (
        demo_view.ProgressState.loading(LoadProgress("rounding", 1, 4, "layers")).text
        == "rounding: 1 of 4 layers"
    )
    assert demo_view.ProgressState.loading(LoadProgress("opening", 0, 0)).text == "opening"


def test_larger_model_exceeds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    models = list[str]()
    monkeypatch.setattr(
        hardware_profile,
        "profile",
        lambda device, notify: hardware_profile.Profile(replace(LAPTOP, ram=24 * 10**9), ""),
    )

    def planned(config: Any, hardware: Any) -> object:
        models.append(config.model)
        return large()

    monkeypatch.setattr(other_hardware, "plan_for_hardware", planned)
    line = demo_summary.larger_model_line(lambda event: None)
    assert models == ["Qwen/Qwen3-14B"]
    assert f"about {large().forecast.tok_per_s:.2g} tokens per second" in line
    assert "`offspec plan Qwen/Qwen3-14B` shows the reasons" in line

    def fail(*_: object) -> None:
        raise PlanError("no disk")

    monkeypatch.setattr(other_hardware, "plan_for_hardware", fail)
    assert demo_summary.larger_model_line(lambda event: None).endswith("cannot be predicted: no disk")

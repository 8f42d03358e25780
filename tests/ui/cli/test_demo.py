"""`offspec demo`: two runs of a scripted engine, side by side or one after the other."""

import io
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from offspec.core.errors import CapacityError, PlanError
from offspec.plan import hardware_profile, other_hardware
from offspec.ui.cli import demo
from tests.support.fake_engine import ScriptedEngine, ScriptedLoad
from tests.support.sample_plans import LAPTOP, large
from tests.ui.cli.program import TEXT

Call = Callable[..., Result]
LINE = "A larger model would do."


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_larger", lambda notify: LINE)


@pytest.mark.usefixtures("larger")
def test_both_runs_and_their_speeds_are_shown(offspec: Call, load: ScriptedLoad) -> None:
    result = offspec("demo", "Why?", "--max-tokens", "50")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:4] == ["one token per pass:", TEXT, "with speculation:", TEXT]
    assert [line.split("  ")[0] for line in lines[5:7]] == ["one token per pass", "with speculation"]
    assert all("tokens per second" in line for line in lines[5:7])
    assert "times the speed, the same text; limit 1.10 GB" in lines[7] and lines[8] == LINE
    assert [(config.draft, config.memory) for config, _ in load.asked] == [
        ("none", 1_100_000_000),
        ("auto", 1_100_000_000),
    ]
    assert [engine.asked[-1].speculate for engine in load.engines] == [False, True]
    assert "O_DIRECT" in result.stderr, "notices are told"


@pytest.mark.usefixtures("larger")
def test_a_limit_that_is_too_small_is_raised_unless_it_was_given(
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
    assert limits == [1_100_000_000, 2_100_000_000, 2_100_000_000]
    limits.clear()
    assert offspec("demo", "--memory", "1GB").exit_code == 1
    assert limits == [1_000_000_000]


def test_columns_stand_side_by_side() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=False)
    runs = [demo.Run("alone", "none", "one two " * 8, tokens=2), demo.Run("drafted", "auto", state="loading")]
    console.print(demo.Columns(console, runs)._drawn())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "alone" in lines[1] and "tok/s" in lines[1] and "drafted  loading" in lines[1]
    assert lines[2].startswith("one two") and len(lines) > 3


def test_the_larger_model_is_one_that_memory_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    monkeypatch.setattr(
        hardware_profile,
        "profile",
        lambda device, notify: hardware_profile.Profile(replace(LAPTOP, ram=24 * 10**9), ""),
    )

    def planned(config: Any, hardware: Any) -> object:
        asked.append(config.model)
        return large()

    monkeypatch.setattr(other_hardware, "plan_for_hardware", planned)
    line = demo._larger(lambda event: None)
    assert asked == ["Qwen/Qwen3-14B"]
    assert f"about {large().forecast.tok_per_s:.2g} tokens per second" in line
    assert "`offspec plan Qwen/Qwen3-14B` says why" in line

    def fail(*_: object) -> None:
        raise PlanError("no disk")

    monkeypatch.setattr(other_hardware, "plan_for_hardware", fail)
    assert demo._larger(lambda event: None).endswith("cannot be predicted: no disk")

"""Choice of the device: the notice, settings that require a GPU, and the device in plans."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import offspec
from offspec import PlanError, RequestError, SamplingParams
from offspec.core.config import EngineConfig
from offspec.core.events import Event, Notice
from offspec.engine.calibration_run import make_plan
from offspec.plan import records
from offspec.plan.choose_device import choose_device
from offspec.plan.load import open_models
from offspec.plan.prepare import plan_key
from offspec_planners.measure import gpu
from offspec_planners.measure.gpu import Fault
from tests.support.plan_fixtures import PlanEnvironment
from tests.support.sample_plans import large, small
from tests.support.tiny_models import write_model

GB = 10**9
BROKEN = Fault("torch 2.9 is a CPU build, but this machine has an NVIDIA GPU", "pip install")


def chosen_device(config: EngineConfig, **more: Any) -> tuple[str, str]:
    """Return the chosen device, and the notice about it."""
    events = list[Event]()
    chosen = choose_device(config, events.append, **more)
    [notice] = events
    assert isinstance(notice, Notice)
    return chosen.device, notice.text


def test_notice_names_the_device_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_device(EngineConfig("demo")) == (
        "cpu",
        "Computes on the CPU: this machine has no NVIDIA GPU",
    )
    assert chosen_device(EngineConfig("demo", device="cpu")) == (
        "cpu",
        "Computes on the CPU, as set by `device`",
    )
    monkeypatch.setattr(gpu, "usable_gpu", lambda: BROKEN)
    line = f"Computes on the CPU: no usable GPU ({BROKEN.found}; pip install)"
    assert chosen_device(EngineConfig("demo")) == ("cpu", line)


@pytest.mark.parametrize(("name", "value"), [("vram", 8 * GB), ("cpu_layers", 3), ("experts", "gpu")])
def test_gpu_setting_without_a_gpu(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "usable_gpu", lambda: BROKEN)
    with pytest.raises(RequestError) as caught:
        choose_device(EngineConfig("demo", **{name: value}))
    assert "no usable GPU (torch 2.9 is a CPU build" in str(caught.value)
    assert f"pip install); omit `{name}`, which needs a GPU" in str(caught.value)
    why = f"on the CPU, as set by `device`; omit `{name}`, which needs a GPU"
    with pytest.raises(RequestError, match=why):
        choose_device(EngineConfig("demo", device="cpu", **{name: value}))


def test_more_memory_than_the_machine_has() -> None:
    ways = (
        lambda: offspec.load("demo", memory="900TB"),
        lambda: make_plan(EngineConfig("demo", memory=900 * 10**12)),
        lambda: open_models(EngineConfig("demo", memory=900 * 10**12), lambda event: None),
    )
    for ask in ways:
        with pytest.raises(RequestError, match=r"`memory` is .*, and this machine has .* of RAM: give a sm"):
            ask()


def test_notice_is_the_first_of_a_load_and_appears_once(tmp_path: Path) -> None:
    folder, events = write_model(tmp_path), list[Event]()
    with offspec.load(folder, draft="none", notify=events.append) as engine:
        assert (engine.config.device, engine.placement["gpu_names"]) == ("cpu", [])
        engine.generate("w5", SamplingParams(max_tokens=2))
    lines = [event.text if isinstance(event, Notice) else "" for event in events]
    assert lines[0].startswith("Computes on the CPU: ")
    assert sum(line.startswith("Computes on") for line in lines) == 1


def test_named_plan_sets_the_device() -> None:
    plan = small()
    assert plan.device == "cpu"
    assert chosen_device(EngineConfig("demo"), plan=plan) == (
        "cpu",
        "Computes on the CPU, as set by the plan",
    )
    with pytest.raises(PlanError, match="the plan has device cuda, not cpu: leave out `device`"):
        choose_device(EngineConfig("demo", device="cpu"), plan=replace(large(), device="cuda"))


def test_plans_are_saved_by_the_chosen_device(plan_env: PlanEnvironment) -> None:
    """A plan made with "auto" is followed with the name of that device, and vice versa."""
    plan = plan_env.plan()
    assert plan.device == "cpu"
    assert plan_env.expect_reuse(device="cpu") == plan_env.expect_reuse() == plan
    keys = list[str]()
    for device in ("auto", "cpu"):
        opened = open_models(plan_env.config(device=device), plan_env.notify)
        keys.append(plan_key(opened))
        opened.close()
    assert len(set(keys)) == 1 and records.load_plan(keys[0]) == plan


@pytest.mark.gpu
@pytest.mark.exhaustive
@pytest.mark.usefixtures("auto_chooses")
def test_auto_selects_the_gpu(plan_env: PlanEnvironment) -> None:
    name = torch.cuda.get_device_name(0)
    device, line = chosen_device(EngineConfig("demo"))
    assert device == "cuda:0" and line.startswith(f"Computes on {name} (cuda:0)")
    line = f"Computes on {name} (cuda:0), as set by `device`"
    assert chosen_device(EngineConfig("demo", device="cuda")) == (device, line)
    with plan_env.load() as engine:
        assert engine.config.device == "cuda:0" and engine.placement["vram"] > 0
        assert engine.placement["gpu_names"] == [name]
        assert engine.plan is not None
        plan = engine.plan
    for device in ("cuda", "cuda:0", "auto"):
        assert plan_env.expect_reuse(device=device) == plan
    alone = plan_env.plan(device="cpu")
    assert (plan.device, alone.device, alone.vram) == ("cuda:0", "cpu", None)


@pytest.mark.gpu
@pytest.mark.usefixtures("auto_chooses")
def test_limit_above_the_vram(tmp_path: Path) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(RequestError, match=r"`vram` is .*, and this machine has .* of GPU memory"):
            offspec.load(write_model(tmp_path / device), device=device, vram="900TB")

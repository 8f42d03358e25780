"""An environment for plans: a cache of its own, and scripted measurements.

The measurements make a draft worthwhile on any machine: transferring weights is slow, and computing costs
next to nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import offspec
from offspec import CapacityError, Notice, SamplingParams
from offspec.core.config import EngineConfig
from offspec.engine import calibration_run as rehearsal
from offspec.engine.engine import Engine
from offspec.plan import build_plan as make_plan
from offspec.plan import prepare
from offspec.plan.opened import OpenedModels
from offspec_planners import search
from offspec_planners.hardware_rates import Rate
from offspec_planners.measured_costs import MeasuredCosts
from offspec_planners.plan import Plan
from tests.support.tiny_models import disturb, write_model

PROMPT = [5, 9, 17, 33, 64, 20, 21, 22, 9]
LAYERS, MB, GB = 5, 10**6, 10**9
MEASURED = MeasuredCosts(
    layer=((2, 1e-3), (64, 1.2e-3), (512, 6e-3)),
    outside=((2, 1e-3), (64, 1e-3), (512, 2e-3)),
    walk=1e-4,
    step=((1, 1e-3), (64, 2e-3)),
    start=1e-4,
    link=Rate.exactly(1e5),
)


class PlanEnvironment:
    """A cache of its own, scripted measurements that are counted, and the notices of the latest load."""

    def __init__(self, models: tuple[Path, Path], cache: Path) -> None:
        self.target, self.near = models
        self.cache = cache
        self.measured = 0
        self.notices: list[str] = []

    def measure(
        self, opened: OpenedModels, assembly: object, config: object, notify: object
    ) -> MeasuredCosts:
        self.measured += 1
        return MEASURED

    def notify(self, event: object) -> None:
        known = ("O_DIRECT", "Computes on")
        if isinstance(event, Notice) and not any(words in event.text for words in known):
            self.notices.append(event.text)

    def load(self, model: Path | None = None, **settings: Any) -> Engine:
        self.notices.clear()
        given = {"draft": str(self.near), "dtype": "float32", "context": 128, "notify": self.notify}
        return offspec.load(str(model or self.target), **(given | settings))

    def plan(self, **settings: Any) -> Plan:
        """Return the plan of a load."""
        with self.load(**settings) as engine:
            assert engine.plan is not None
            return engine.plan

    def expect_replan(self, reason: str, **settings: Any) -> Plan:
        """Return the plan of a load that must plan again, and report the reason in one line."""
        before = self.measured
        plan = self.plan(**settings)
        assert self.measured == before + 1
        assert len(self.notices) == 1 and reason in self.notices[0], self.notices
        assert "planning again: " in self.notices[0] and "\n" not in self.notices[0]
        return plan

    def expect_reuse(self, **settings: Any) -> Plan:
        """Return the plan of a load that must reuse a plan: without measurements or notices."""
        before = self.measured
        plan = self.plan(**settings)
        assert (self.measured, self.notices) == (before, [])
        return plan

    def files(self) -> dict[str, bytes]:
        return {str(file): file.read_bytes() for file in self.cache.rglob("*.json")}

    def config(self, **settings: Any) -> EngineConfig:
        given = {"draft": str(self.near), "dtype": "float32", "context": 128}
        return EngineConfig(str(self.target), **(given | settings))

    def learn(self, prompts: int = 4, **settings: Any) -> float:
        """Answer until the draft's scores are calibrated; return their temperature."""
        with self.load(**settings) as engine:
            for first in range(prompts):
                engine.generate([3 + first, *PROMPT], SamplingParams(max_tokens=40, ignore_eos=True))
            return engine.drafting.calibration(engine.sources[0], 0.0, True).fit.tau


def least_memory(folder: Path, **settings: Any) -> int:
    """Return the least memory that a load with these settings takes."""
    with pytest.raises(CapacityError) as caught:
        offspec.load(str(folder), **({"dtype": "float32", "context": 128, "memory": 1} | settings))
    return caught.value.needed


def write_large(folder: Path) -> Path:
    """Write a model of 25 MB with layers of 4 MB."""
    return write_model(folder, num_hidden_layers=6, hidden_size=256, intermediate_size=1024)


def save_plan(plan: Plan, file: Path, **changes: Any) -> str:
    file.write_text(json.dumps(plan.to_json() | changes))
    return str(file)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that agrees with it in part."""
    folder = tmp_path_factory.mktemp("models")
    target = write_model(folder / "target", num_hidden_layers=LAYERS)
    near = write_model(folder / "near", num_hidden_layers=LAYERS)
    disturb(near)
    return target, near


def scripted_planning(models: tuple[Path, Path], cache: Path, patch: pytest.MonkeyPatch) -> PlanEnvironment:
    patch.setenv("OFFSPEC_CACHE", str(cache))
    found = PlanEnvironment(models, cache)
    patch.setattr(prepare, "measure", found.measure)
    patch.setattr(search, "BUDGETS", (1, 16, 64))
    patch.setattr(make_plan, "WIDTHS", (4, 16))
    return found


@pytest.fixture
def plan_env(pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanEnvironment:
    return scripted_planning(pair, tmp_path / "cache", monkeypatch)


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer calibration prompts, in words of the tiny vocabulary."""
    monkeypatch.setattr(rehearsal, "CALIBRATION", ("w5 w9 w17 w33", "w64 w20", "w8", "w40 w41"))

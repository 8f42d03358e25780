"""Seconds of layers on a GPU: between events around their kernels, without what the host waited for."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.model import runner
from offspec.model.pass_time import DeviceTime
from offspec_planners.placement import Placement, Tier
from tests.support.simulated_cuda.late import late as late
from tests.support.tiny_models import tiny_engine, write_model

pytestmark = pytest.mark.gpu
CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.HOST)


class _At(torch.cuda.Event):
    """An event that comes at a known second."""

    second = math.nan

    def elapsed_time(self, end: Any) -> float:
        return float(end.second - self.second) * 1000


def _at(second: float) -> torch.cuda.Event:
    event = _At(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(CUDA))
    event.second = second
    return event


def _layer(
    first: float, last: float, asked: float = 0.0, stalled: float = 0.0, place: torch.device = CUDA
) -> DeviceTime:
    return DeviceTime(place, _at(first), _at(last), asked, stalled)


def test_waits_are_not_computed() -> None:
    """The host waits for weights while the layer before is computed: a device that is busy does not wait."""
    assert _layer(1.0, 1.5, stalled=0.2).computed() == pytest.approx(0.3)
    assert _layer(1.0, 1.1, stalled=0.2).computed() == 0
    assert _layer(1.0, 1.5, stalled=0.2).waited(None) == pytest.approx(0.2)
    layer = _layer(3.0, 4.0, asked=0.5, stalled=0.25)
    for before, waited in (
        (None, 0.5),
        (_layer(1.0, 2.9), 0.1),
        (_layer(1.0, 2.0), 0.5),
        (_layer(1.0, 3.5), 0.0),
        (_layer(1.0, 2.9, place=OTHER), 0.5),
    ):
        assert layer.waited(before) == pytest.approx(waited + 0.25)


@pytest.mark.usefixtures("late")
def test_events_stand_in_front_of_a_layer_and_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = list[bool]()

    def noted(*given: Any) -> DeviceTime:
        layer = DeviceTime(*given)
        layer.first.synchronize()
        between.append(not layer.last.query())
        layer.last.synchronize()
        assert torch.cuda.current_stream(CUDA).query(), "some of the layer was still to be computed"
        return layer

    monkeypatch.setattr(runner, "DeviceTime", noted)
    model = write_model(tmp_path / "model", num_hidden_layers=len(TIERS))
    with tiny_engine(model, "none", budget=1, placement=Placement(TIERS, 2, 2), device=CUDA) as engine:
        engine.generate([5, 9, 17], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(between) == 3 * len(TIERS) and all(between)

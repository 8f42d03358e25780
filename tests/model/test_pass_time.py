"""Timing of layers on a GPU: between events around their kernels, without host waits."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from offspec import SamplingParams
from offspec.model import runner
from offspec.model.pass_time import LayerTime
from offspec_planners.placement import Placement, Tier
from tests.support.simulated_cuda.late import late as late
from tests.support.tiny_models import tiny_engine, write_model

pytestmark = pytest.mark.gpu
CUDA, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.HOST)


class _At(torch.cuda.Event):
    """Event at a known second."""

    second = math.nan

    def elapsed_time(self, end: Any) -> float:
        return float(end.second - self.second) * 1000


def _at(second: float) -> torch.cuda.Event:
    event = _At(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(CUDA))
    event.second = second
    return event


def _layer(
    first: float, last: float, weight_wait: float = 0.0, expert_wait: float = 0.0, place: torch.device = CUDA
) -> LayerTime:
    return LayerTime(place, _at(first), _at(last), weight_wait, expert_wait)


def test_waits_do_not_count_as_computation() -> None:
    """Host waits for weights while the previous layer is still computed are not device waits."""
    assert _layer(1.0, 1.5, expert_wait=0.2).computed() == pytest.approx(0.3)
    assert _layer(1.0, 1.1, expert_wait=0.2).computed() == 0
    assert _layer(1.0, 1.5, expert_wait=0.2).waited(None) == pytest.approx(0.2)
    layer = _layer(3.0, 4.0, weight_wait=0.5, expert_wait=0.25)
    for before, waited in (
        (None, 0.5),
        (_layer(1.0, 2.9), 0.1),
        (_layer(1.0, 2.0), 0.5),
        (_layer(1.0, 3.5), 0.0),
        (_layer(1.0, 2.9, place=OTHER), 0.5),
    ):
        assert layer.waited(before) == pytest.approx(waited + 0.25)


@pytest.mark.usefixtures("late")
def test_events_are_recorded_before_and_after_a_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between = list[bool]()

    def noted(*given: Any) -> LayerTime:
        layer = LayerTime(*given)
        layer.first.synchronize()
        between.append(not layer.last.query())
        layer.last.synchronize()
        assert torch.cuda.current_stream(CUDA).query(), "part of the layer was not computed yet"
        return layer

    monkeypatch.setattr(runner, "LayerTime", noted)
    model = write_model(tmp_path / "model", num_hidden_layers=len(TIERS))
    with tiny_engine(model, "none", budget=1, placement=Placement(TIERS, 2, 2), device=CUDA) as engine:
        engine.generate([5, 9, 17], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(between) == 3 * len(TIERS) and all(between)

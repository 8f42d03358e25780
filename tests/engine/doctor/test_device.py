"""Whether models are computed on the GPU, as the doctor says."""

import pytest

from offspec.engine.doctor import device
from offspec.engine.doctor.finding import Asked, Finding
from offspec_planners.measure import gpu
from offspec_planners.measure.driver import Fault
from offspec_planners.measure.gpu import Gpu


def found() -> Finding:
    [finding] = device.check(Asked())
    return finding


def test_a_gpu_that_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "usable_gpu", lambda: Gpu(1, "NVIDIA L4", 24 * 10**9, (8, 9), 58))
    assert (found().state, found().found) == ("ok", "the GPU NVIDIA L4 (cuda:1)")
    assert found().figures == {"device": "cuda:1"}


def test_no_gpu() -> None:
    assert (found().state, found().found) == ("ok", "the CPU: this machine has no NVIDIA GPU")
    assert found().remedy == ""


def test_a_gpu_that_is_unusable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "usable_gpu", lambda: Fault("no driver", "install one"))
    assert (found().state, found().found) == ("limited", "the CPU, not on a GPU: no driver")
    assert found().remedy == "install one" and found().figures == {"device": "cpu"}

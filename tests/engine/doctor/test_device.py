"""Doctor: device check."""

import pytest

from offspec.engine.doctor import device
from offspec.engine.doctor.finding import DoctorOptions
from offspec_planners.measure import gpu
from offspec_planners.measure.gpu import Fault, Gpu

GPU = Gpu(1, "NVIDIA L4", 24 * 10**9, (8, 9), 58)


@pytest.mark.parametrize(
    ("usable", "state", "told", "remedy", "chosen"),
    [
        (GPU, "ok", "the GPU NVIDIA L4 (cuda:1)", "", "cuda:1"),
        (Fault("this machine has no NVIDIA GPU"), "ok", "the CPU: this machine has no NVIDIA GPU", "", "cpu"),
        (
            Fault("no driver", "install one"),
            "limited",
            "the CPU, not a GPU: no driver",
            "install one",
            "cpu",
        ),
    ],
)
def test_default_device(
    monkeypatch: pytest.MonkeyPatch, usable: Gpu | Fault, state: str, told: str, remedy: str, chosen: str
) -> None:
    monkeypatch.setattr(gpu, "usable_gpu", lambda: usable)
    [finding] = device.check(DoctorOptions())
    assert (finding.state, finding.found, finding.remedy) == (state, told, remedy)
    assert finding.figures == {"device": chosen}

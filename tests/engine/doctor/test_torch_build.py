"""Doctor: torch build for this driver, or the command that installs it, and each GPU."""

import builtins
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec.engine.doctor import torch_build
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec_planners.measure import gpu
from offspec_planners.measure.gpu import Driver

CARD = SimpleNamespace(
    name="NVIDIA GeForce RTX 4090", total_memory=25_000_000_000, major=8, minor=9, multi_processor_count=128
)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with one working GPU and a matching build; tests change single properties."""
    machine: dict[str, Any] = {
        "driver": Driver((12, 8), 1),
        "card": CARD,
        "free": 24_000_000_000,
        "sum": None,
    }

    def arange(*args: Any, device: Any = None, **options: Any) -> Any:
        if isinstance(machine["sum"], Exception):
            raise machine["sum"]
        return real(*args, **options) if machine["sum"] is None else torch.tensor(machine["sum"])

    real = torch.arange
    for module in (torch_build, gpu):
        monkeypatch.setattr(module, "find_driver", lambda: machine["driver"])
    monkeypatch.setattr(torch, "arange", arange)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine["card"])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (machine["free"], CARD.total_memory))
    return machine


def found() -> list[Finding]:
    return list(torch_build.check(DoctorOptions()))


def test_a_machine_where_all_is_well(machine: dict[str, Any]) -> None:
    build, card = found()
    assert (build.state, card.state) == ("ok", "ok")
    assert "built for CUDA 12.8" in build.found
    assert card.found == "NVIDIA GeForce RTX 4090, 25.00 GB, compute capability 8.9, 24.00 GB free"
    assert build.remedy == card.remedy == ""


@pytest.mark.parametrize("driver", [None, Driver((12, 4), 0), Driver((12, 4), 1, error=999)])
def test_without_a_usable_driver_a_build_for_the_processor_is_well(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, driver: Driver | None
) -> None:
    machine["driver"] = driver
    monkeypatch.setattr(torch.version, "cuda", None)
    [build] = found()
    assert build.state == "ok" and "built for the CPU" in build.found


@pytest.mark.parametrize(
    ("built", "cuda", "why", "line"),
    [
        (None, (13, 1), "is a CPU build", "pip uninstall -y torch triton && pip install torch"),
        (None, (12, 9), "is a CPU build", "torch --index-url https://download.pytorch.org/whl/cu128"),
        (None, (12, 2), "is a CPU build", "torch --index-url https://download.pytorch.org/whl/cu126"),
        (None, (11, 8), "is a CPU build", "update NVIDIA's driver"),
        ("13.0", (12, 8), "the driver supports CUDA 12.8", "update the driver, or: "),
        ("13.0", (12, 8), "the driver supports CUDA 12.8", "cu128"),
    ],
)
def test_a_build_that_is_not_for_the_driver(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, built: str | None, cuda: tuple[int, int],
    why: str, line: str,
) -> None:  # fmt: skip
    machine["driver"] = Driver(cuda, 1)
    monkeypatch.setattr(torch.version, "cuda", built)
    [build] = found()
    assert build.state == "failed" and why in build.found and line in build.remedy


def test_a_build_that_finds_no_gpu_gives_the_reason(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA unknown error - this may be\ndue to an environment")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", fail)
    [build] = found()
    assert build.state == "failed"
    assert "RuntimeError: CUDA unknown error - this may be" in build.found and "\n" not in build.found


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "torch":
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    [build] = found()
    assert build.state == "failed" and "libcudart.so.13" in build.found
    assert "pip install --force-reinstall torch" in build.remedy


NO_CODE = RuntimeError("CUDA error: no kernel image is available for execution on the device\nTo")
OLD = SimpleNamespace(**{**vars(CARD), "major": 7, "minor": 5})


@pytest.mark.parametrize(
    ("changed", "state", "words", "remedy"),
    [
        ({"sum": NO_CODE}, "failed", "no kernel image", "cu128"),
        ({"sum": NO_CODE}, "failed", "sm_80, sm_90", "cu128"),
        ({"sum": 499501.0}, "failed", "", ""),
        ({"free": 100_000_000}, "limited", "", "nvidia-smi"),
        ({"card": OLD}, "limited", "torch's slower operations", ""),
    ],
)
def test_a_card_that_is_not_well(
    machine: dict[str, Any], changed: dict[str, Any], state: str, words: str, remedy: str
) -> None:
    machine.update(changed)
    card = found()[1]
    assert card.state == state and words in card.found and remedy in card.remedy

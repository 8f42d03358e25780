"""Doctor: NVIDIA driver, present, absent, and failing in all known ways."""

import ctypes
from pathlib import Path
from typing import Any

import pytest

from offspec.engine.doctor import driver
from offspec.engine.doctor.finding import DoctorOptions, Finding
from offspec_planners import measure


class Library:
    """Fake libcuda: return values and outputs of its functions."""

    def __init__(self, version: int = 12040, error: int = 0, gpus: int = 1) -> None:
        self._version, self._error, self._gpus = version, error, gpus

    def cuDriverGetVersion(self, out: Any) -> int:
        out._obj.value = self._version
        return 0

    def cuInit(self, flags: int) -> int:
        return self._error

    def cuDeviceGetCount(self, out: Any) -> int:
        out._obj.value = self._gpus
        return 0


@pytest.fixture
def bus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty PCI bus, and a machine without a driver."""
    monkeypatch.setattr(measure.gpu, "_PCI", tmp_path)
    monkeypatch.setattr(measure.gpu, "_KERNEL_MODULE", tmp_path / "version")
    no_library(monkeypatch)
    return tmp_path


def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)


def plug_in(bus: Path, vendor: str = "0x10de", kind: str = "0x030000") -> None:
    device = bus / f"device{len(list(bus.iterdir()))}"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")


def found() -> Finding:
    [finding] = driver.check(DoctorOptions())
    return finding


def test_a_machine_without_a_gpu(bus: Path) -> None:
    plug_in(bus, vendor="0x8086")
    plug_in(bus, kind="0x040300")  # the sound of a card
    (bus / "broken").mkdir()
    assert found().state == "absent"
    assert found().remedy == ""


def test_a_gpu_without_a_driver(bus: Path) -> None:
    plug_in(bus)
    assert found().state == "failed"
    assert "1 NVIDIA GPU, but no driver" in found().found
    assert "--gpus all" in found().remedy


@pytest.mark.parametrize(
    ("error", "why", "remedy"),
    [
        (100, "it finds no GPU it is allowed to use", "CUDA_VISIBLE_DEVICES"),
        (803, "different versions", "restart"),
        (804, "older than the CUDA libraries", "driver of the host"),
        (999, "without giving a reason", "modprobe"),
        (46, "CUDA error 46", "install NVIDIA's driver"),
    ],
)
def test_a_driver_that_does_not_start(
    bus: Path, monkeypatch: pytest.MonkeyPatch, error: int, why: str, remedy: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(error=error))
    assert found().state == "failed"
    assert why in found().found and remedy in found().remedy
    assert found().figures["error"] == error


def test_a_driver_that_is_given_no_gpu(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(gpus=0))
    assert found().state == "failed"
    assert "CUDA_VISIBLE_DEVICES" in found().remedy


def test_a_driver_that_works(bus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(bus)
    plug_in(bus, kind="0x030200")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(version=13000, gpus=2))
    (bus / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23\n")
    assert found() == Finding(
        "NVIDIA driver",
        "ok",
        "580.95.05, for CUDA 13.0; 2 GPUs",
        figures={"cards": 2, "kernel_module": "580.95.05", "cuda": "13.0", "gpus": 2, "error": 0},
    )

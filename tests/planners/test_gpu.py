"""The default GPU, and the reason if there is none: without compiling a kernel."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offspec_planners.measure import gpu
from offspec_planners.measure.gpu import Driver, Fault, Gpu, cards_on_bus, find_driver

GB = 10**9
pytestmark = pytest.mark.usefixtures("auto_chooses")


def card(name: str, major: int = 8, minor: int = 9) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, total_memory=24 * GB, major=major, minor=minor, multi_processor_count=128
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with two cards and a build of torch for them; a test changes a part.

    free: bytes of each card; fails: error of its first use, by index.
    """
    machine: dict[str, Any] = {
        "cards": [card("NVIDIA L4"), card("NVIDIA L40")],
        "free": [20 * GB, 20 * GB],
        "fails": {},
        "driver": Driver((12, 8), 2),
    }
    real = torch.arange

    def arange(*args: Any, device: torch.device, **options: Any) -> torch.Tensor:
        if device.index in machine["fails"]:
            raise machine["fails"][device.index]
        return real(*args, **options)

    monkeypatch.setattr(torch, "arange", arange)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(machine["cards"]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(machine["cards"]))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: machine["cards"][device.index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (machine["free"][device.index], 24 * GB))
    monkeypatch.setattr(gpu, "find_driver", lambda: machine["driver"])
    monkeypatch.setattr(gpu, "cards_on_bus", lambda: 2)
    return machine


def chosen() -> Gpu:
    found = gpu.usable_gpu()
    assert isinstance(found, Gpu), found
    return found


def fault() -> Fault:
    found = gpu.usable_gpu()
    assert isinstance(found, Fault), found
    return found


def test_first_card_is_chosen_even_if_too_old_for_kernels(machine: dict[str, Any]) -> None:
    assert (chosen().index, chosen().name, chosen().free) == (0, "NVIDIA L4", 20 * GB)
    machine["cards"][0] = card("Tesla T4", 7, 5)
    assert chosen().index == 0 and chosen().limit is not None


def test_faulty_or_full_card_is_skipped(machine: dict[str, Any]) -> None:
    machine["fails"][0] = RuntimeError("CUDA error: no kernel image is available\nand more")
    assert chosen().index == 1
    machine["fails"][1] = RuntimeError("another")
    assert "NVIDIA L4" in fault().found and "no kernel image is available (torch has code" in fault().found
    assert "cu128" in fault().remedy and "\n" not in str(fault())

    machine["fails"].clear()
    machine["free"][0] = GB
    assert chosen().index == 1
    machine["free"][1] = 0
    assert "only 1.00 GB of its memory is free" in fault().found and "nvidia-smi" in fault().remedy


def test_card_in_exclusive_use_and_cpu_build(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    assert "GPU 0 cannot be opened" in fault().found and "busy" in fault().found
    machine["cards"] = []
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "is a CPU build, but this machine has an NVIDIA GPU" in fault().found
    assert "pip install torch --index-url" in fault().remedy
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert '`device="cuda"`' in fault().remedy, "a build for other cards is not taken by itself"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Driver((11, 4), 1), ("built for CUDA 12.8, but the driver supports CUDA 11.4", "update")),
        (None, ("2 NVIDIA GPUs, but no driver", "--gpus all")),
        (Driver((12, 8), 0, error=100), ("CUDA_VISIBLE_DEVICES",)),
    ],
    ids=["old", "none", "hidden"],
)
def test_driver_without_a_card(machine: dict[str, Any], found: Driver | None, words: tuple[str, ...]) -> None:
    machine["cards"], machine["driver"] = [], found
    assert all(word in f"{fault().found}: {fault().remedy}" for word in words)


def test_no_card(machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine["cards"], machine["driver"] = [], None
    monkeypatch.setattr(gpu, "cards_on_bus", cards_on_bus)
    monkeypatch.setattr(gpu, "_PCI", tmp_path)
    assert fault() == Fault("this machine has no NVIDIA GPU")

    def refuse(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert find_driver() is None


@pytest.mark.gpu
def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of ours is compiled for the choice."""
    monkeypatch.setattr("offspec_kernels.backend.triton_disabled_reason", None)
    found = chosen()
    assert (found.index, found.name) == (0, torch.cuda.get_device_name(0))
    assert found.free is not None and 0 < found.free <= found.memory
